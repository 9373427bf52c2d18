"""lm-eval-harness on three questions: loglikelihoods of choices, which need `echo` and logprobs, and generated text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedded_model import EMBEDDED_MODEL
from server_process import ServerProcess

pytestmark = pytest.mark.model

TASKS = Path(__file__).parent / "lm_eval_tasks"
Run = Callable[..., str]


def evaluate(run_module: Run, directory: Path, model: str, tasks: str, arguments: dict[str, str]) -> dict[str, Any]:
    """Run lm-eval; return its samples by task."""
    shutil.copytree(TASKS, directory, dirs_exist_ok=True)
    options = {"model": EMBEDDED_MODEL, "num_concurrent": "2", "max_retries": "1", **arguments}
    run_module(
        "lm-eval",
        "lm_eval",
        *("--model", model, "--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
        *("--include_path", ".", "--tasks", tasks, "--output_path", "results", "--log_samples"),
        *(("--apply_chat_template",) if model == "local-chat-completions" else ()),
    )
    return {
        task: [json.loads(line) for line in next(Path(directory).glob(f"results/**/samples_{task}_*")).open()]
        for task in tasks.split(",")
    }


def test_completions(server: ServerProcess, smollm2_directory: Path, tmp_path: Path, run_module: Run) -> None:
    where = {"base_url": f"{server.url}/v1/completions", "tokenizer": str(smollm2_directory)}
    samples = evaluate(run_module, tmp_path, "local-completions", "tiny_choose,tiny_generate", where)
    chosen = samples["tiny_choose"]
    assert len(chosen) == 3
    for sample in chosen:
        assert all(float(likelihood) < 0 for ((likelihood, _),) in sample["resps"])
    assert chosen[0]["acc"] == 1.0, "Paris is likelier than Rome and Oslo"
    is_greedy = [flag for ((_, flag),) in chosen[0]["resps"]]
    assert [str(flag) for flag in is_greedy] == ["True", "False", "False"], "and what the model would say itself"
    assert "Paris" in samples["tiny_generate"][0]["resps"][0][0]


def test_chat(server: ServerProcess, tmp_path: Path, run_module: Run) -> None:
    where = {"base_url": f"{server.url}/v1/chat/completions"}
    samples = evaluate(run_module, tmp_path, "local-chat-completions", "tiny_generate", where)
    assert len(samples["tiny_generate"]) == 3
    assert all(sample["resps"][0][0] for sample in samples["tiny_generate"])
