"""Defaults of sampling: from generation_config.json, from the operator, and where a request says something itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_rig import MAX_MODEL_LEN, make_config, running, says

from octavo.api_server.model_directory import overridden, parse_default_sampling, read_default_sampling
from octavo.protocol.config import DefaultSampling, EngineConfig
from octavo.protocol.lifecycle import ExitCode, StartupError

DEFAULTS = DefaultSampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1, max_new_tokens=40)


def with_defaults(directory: Path, default_sampling: DefaultSampling) -> EngineConfig:
    config = make_config(directory)
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, default_sampling=default_sampling)
    )


async def test_a_request_that_says_nothing_gets_the_models_defaults(tmp_path: Path) -> None:
    async with running(tmp_path, says("x" * 100), config=with_defaults(tmp_path, DEFAULTS)) as rig:
        assert (await rig.chat())[0] == 200
        assert (await rig.complete())[0] == 200
        chat, completion = [request.sampling_params for request in rig.engine.added]
    for params in (chat, completion):
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.05)
        assert params.repetition_penalty == 1.1
    assert (chat.max_tokens, completion.max_tokens) == (40, 16)


async def test_what_a_request_says_counts_also_when_it_is_neutral(tmp_path: Path) -> None:
    neutral = {"temperature": 1, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 200}
    async with running(tmp_path, says("x" * 200), config=with_defaults(tmp_path, DEFAULTS)) as rig:
        assert (await rig.chat(**neutral))[0] == 200
        assert (await rig.chat(temperature=0, max_tokens=1))[0] == 200
        first, second = [request.sampling_params for request in rig.engine.added]
    assert (first.temperature, first.top_k, first.top_p, first.min_p) == (1, 0, 1, 0)
    assert (first.repetition_penalty, first.max_tokens) == (1, 200)
    assert (second.temperature, second.top_p) == (0, 0.95)


async def test_the_context_bounds_the_default_length(tmp_path: Path) -> None:
    config = with_defaults(tmp_path, DefaultSampling(max_new_tokens=10_000))
    async with running(tmp_path, says("x" * MAX_MODEL_LEN), config=config) as rig:
        assert (await rig.chat())[0] == 200
        (request,) = rig.engine.added
    assert request.sampling_params.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)


def test_the_file_is_read(tmp_path: Path) -> None:
    assert read_default_sampling(tmp_path) == DefaultSampling()
    content = {
        "do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": None,
        "eos_token_id": [1, 2], "transformers_version": "4.51.0",
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_default_sampling(tmp_path) == DefaultSampling(temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize(
    "content", [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_k": 2.5}, {"repetition_penalty": 0}]
)
def test_a_broken_file_is_refused_with_the_field(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(StartupError) as problem:
        read_default_sampling(tmp_path)
    assert problem.value.exit_code is ExitCode.BAD_WEIGHTS
    assert next(iter(content)) in str(problem.value)
    assert "generation_config.json" in str(problem.value)


def test_the_operator_overrides_single_fields() -> None:
    override = parse_default_sampling('{"temperature": 0.1, "top_k": 5}')
    assert overridden(DEFAULTS, override) == msgspec.structs.replace(DEFAULTS, temperature=0.1, top_k=5)
    assert overridden(DefaultSampling(), override) == DefaultSampling(temperature=0.1, top_k=5)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"temprature": 1}', '{"temperature": NaN}', '{"temperature": 1001}'])
def test_an_override_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a JSON object of temperature, top_k, "):
        parse_default_sampling(text)
