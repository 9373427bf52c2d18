"""The API server process: bind the port first, then become able to serve.

Nothing heavy is imported before the port is bound, so a taken port costs no time, and nobody who sees the port open
waits for a refused connection later: from then on `/health` and `/ready` tell how far the start is.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable

from octavo.api_server.api_keys import load_api_keys
from octavo.protocol.config import ApiConfig
from octavo.protocol.lifecycle import PORT_PHASE, Command, ExitCode, Launch, Reporter, StartupError, run_child


class CommandInbox:
    """Commands from the watching thread, kept until somebody can take them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early_commands: list[Command] = []
        self._deliver: Callable[[Command], None] | None = None

    def put(self, command: Command) -> None:
        with self._lock:
            if self._deliver is None:
                self._early_commands.append(command)
            else:
                self._deliver(command)

    def connect(self, deliver: Callable[[Command], None]) -> None:
        """Have `deliver` called in the watching thread for each command, and now for those that came before."""
        with self._lock:
            self._deliver = deliver
            for command in self._early_commands:
                deliver(command)


def bind(api: ApiConfig) -> socket.socket:
    """Return a bound socket; raise StartupError when the port is taken or the address is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            api.host, api.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as problem:
        text = f"cannot resolve --host {api.host}: {problem.strerror}"
        raise StartupError(ExitCode.USAGE, text) from problem
    result = socket.socket(family, kind, protocol)
    try:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.bind(address)
        result.listen()  # two sockets may share an address until one listens
    except OSError as problem:
        result.close()
        if problem.errno == errno.EADDRINUSE:
            text = f"{api.host}:{api.port} is already in use; stop the other server or choose another --port"
            raise StartupError(ExitCode.PORT_TAKEN, text) from problem
        raise StartupError(ExitCode.FAILURE, f"cannot bind {api.host}:{api.port}: {problem.strerror}") from problem
    return result


def url_of(listening_socket: socket.socket) -> str:
    host, port = listening_socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main(launch: Launch, reporter: Reporter, inbox: CommandInbox) -> None:
    key_file = launch.config.api.api_key_file
    api_keys = load_api_keys(key_file) if key_file is not None else None
    listening_socket = bind(launch.config.api)
    reporter.progress(PORT_PHASE, url_of(listening_socket))

    import asyncio

    import uvloop

    from octavo.api_server.server import ApiServer
    from octavo.api_server.tokenizer import Tokenizer

    reporter.progress("imports")
    tokenizer = Tokenizer.load(launch.config.model.path)
    reporter.progress("tokenizer", f"{tokenizer.vocab_size} tokens")

    async def serve() -> None:
        server = ApiServer(launch.config, launch.index, tokenizer, api_keys)
        loop = asyncio.get_running_loop()

        def deliver(command: Command) -> None:
            if command is Command.DRAIN:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
                    loop.call_soon_threadsafe(server.drain)

        inbox.connect(deliver)
        await server.run(listening_socket, reporter.ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    tokenizer.close()


if __name__ == "__main__":
    inbox = CommandInbox()
    run_child("api_server", lambda launch, reporter: main(launch, reporter, inbox), inbox.put)
