"""guidellm, a public load generator, measures the embedded model: every request is whole and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.model

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 4, 8


def test_a_small_load(
    server: ServerProcess, smollm2_directory: Path, tmp_path: Path, run_module: Callable[..., str]
) -> None:
    run_module(
        "guidellm",
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={server.url}", "--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_OUTPUT_TOKENS}"),
        *("--tokenizer", f"kind=hf_auto,model={smollm2_directory}"),
    )
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
    assert {each["output_tokens"] for each in requests["successful"]} == {NUM_OUTPUT_TOKENS}
