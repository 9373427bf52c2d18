"""schemathesis makes requests out of /openapi.json, right and wrong ones: the server does as its description says.

The server is real but for its worker, which plays a script, so that thousands of requests take seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import ServerProcess

from octavo.api_server.http.routes import ROUTES

pytestmark = pytest.mark.model

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
NUM_EXAMPLES = 50  # of each operation
HOOKS = Path(__file__).parent / "programs" / "schemathesis_hooks.py"


def num_answers(archive: Path) -> Counter[str]:
    """Answers with status 200 by path, from a HAR file."""
    entries = json.loads(archive.read_text())["log"]["entries"]
    good = (each["request"]["url"] for each in entries if each["response"]["status"] == 200)
    return Counter("/" + url.split("/", 3)[3] for url in good)


def test_the_server_does_as_its_description_says(tmp_path: Path, run_module: Callable[..., str]) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"text": "Hello there friend"}')
    archive = tmp_path / "calls.har"
    with ServerProcess(script, "--engine", "replay") as server:
        run_module(
            "schemathesis",
            "schemathesis.cli",
            *("run", f"{server.url}/openapi.json", "--url", server.url, "--request-timeout", "60"),
            *("--phases", "coverage,fuzzing", "--max-examples", str(NUM_EXAMPLES), "--checks", ",".join(CHECKS)),
            *("--seed", "1", "--generation-database", "none", "--report-har-path", str(archive)),
            environment={"SCHEMATHESIS_HOOKS": HOOKS.stem, "PYTHONPATH": str(HOOKS.parent)},
        )
    answered = num_answers(archive)
    for path in (route.path for route in ROUTES if route.body is not None):
        assert answered[path] > 5, "too few requests were right for their answers to be checked"
