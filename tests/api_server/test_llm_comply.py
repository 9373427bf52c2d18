"""llm-comply's own checks of the Responses and the Messages API.

What cannot pass is named: images, which this server refuses, and calls that are demanded, which need grammars. Tests
that llm-comply skips for a model of this name count as neither.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from http_rig import MODEL, running
from named_streams import ends

LLM_COMPLY = Path(sys.executable).with_name("llm-comply")
CANNOT_PASS = {
    "anthropic": {"anth-image-input", "anth-tool-calling"},
    "open-responses": {"image-input", "tool-calling"},
}
NUM_PASSING = {"anthropic": 6, "open-responses": 10}


@pytest.mark.parametrize("api", CANNOT_PASS)
async def test_everything_that_can_pass_does(tmp_path: Path, api: str) -> None:
    async with running(tmp_path, ends("Hello there friend"), max_model_len=8192) as rig:
        command = f"--base-url {rig.url}/v1 --api-key none --model {MODEL} --format {api} --json --timeout 30"
        process = await asyncio.create_subprocess_exec(
            str(LLM_COMPLY), *command.split(), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    results = json.loads(output)["results"]
    by_status = {
        status: {each["id"] for each in results if each["status"] == status} for status in ("passed", "failed")
    }
    assert by_status["failed"] == CANNOT_PASS[api]
    assert len(by_status["passed"]) == NUM_PASSING[api]
