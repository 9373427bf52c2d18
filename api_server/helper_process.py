"""The frame of our helper processes: what a helper prints is its result, or the reason why there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from octavo.protocol.lifecycle import ExitCode, Failed, StartupError, encode_status


def run_helper(main: Callable[..., str]) -> None:
    """Call `main` with the command line's arguments, print what it returns, and end the process.

    A problem is printed as a Failed status, and the exit status is its exit code. What it writes is for its user only.
    """
    os.umask(0o077)
    try:
        output, exit_code = main(*sys.argv[1:]), ExitCode.OK
    except StartupError as problem:
        output, exit_code = encode_status(Failed(problem.exit_code, problem.message)).decode(), problem.exit_code
    except OSError as problem:
        failed = Failed(ExitCode.FAILURE, f"{problem.filename or ''}: {problem.strerror or problem}")
        output, exit_code = encode_status(failed).decode(), ExitCode.FAILURE
    print(output)  # noqa: T201 - the result
    sys.exit(exit_code)
