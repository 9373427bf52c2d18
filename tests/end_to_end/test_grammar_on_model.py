"""The default model follows schemas, however its steps are cut, and its neighbours do not notice."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import tokenizers
from embedded_model import embedded_model_config
from grammar_cases import of_schema
from inline_engine import InlineEngine

from octavo.protocol.config import CacheConfig, Dtype, PreemptionMode, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, FinishReason, RequestOutput
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model
EOS = 2
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Germany", "Italy"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "population", "is_capital"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "city": CITY,
    "cities": {"type": "array", "items": CITY, "minItems": 2, "maxItems": 2},
    "animal": {
        "type": "object",
        "properties": {"legs": {"enum": [0, 2, 4, 8]}, "name": {"type": "string", "pattern": "^[a-z]{3,12}$"}},
        "required": ["legs", "name"],
        "additionalProperties": False,
    },
    "date": {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]$"},
}
CELLS = {
    "in-flight-2": (SchedulerConfig(max_num_seqs=12), CacheConfig(num_device_blocks=120)),
    "chunks": (SchedulerConfig(max_num_seqs=12, max_tokens_per_request=7), CacheConfig(num_device_blocks=120)),
    "recomputed": (SchedulerConfig(max_num_seqs=12), CacheConfig(num_device_blocks=12)),
    "swapped": (
        SchedulerConfig(max_num_seqs=12, preemption_mode=PreemptionMode.SWAP),
        CacheConfig(num_device_blocks=12, num_host_blocks=120, enable_prefix_caching=False),
    ),
}
ALONE = (SchedulerConfig(max_num_seqs=12, max_steps_in_flight=1), CacheConfig(num_device_blocks=120))


@pytest.fixture(scope="module")
def tokenizer(smollm2_directory) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(smollm2_directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def make_engine(smollm2_gguf, smollm2_directory):
    def make(scheduler: SchedulerConfig, cache: CacheConfig) -> InlineEngine:
        config = embedded_model_config(
            smollm2_directory, smollm2_gguf, cache, scheduler, max_model_len=192, dtype=Dtype.FLOAT32
        )
        return InlineEngine(
            msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, eos_token_ids=(EOS,)))
        )

    return make


@pytest.fixture(scope="module")
def commands(tokenizer) -> tuple[list[AddRequest], list[AddRequest]]:
    """Requests that follow schemas, and their neighbours."""

    def add(name: str, order: int, text: str, fork_of: str = "", **options: Any) -> AddRequest:
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(**{"max_tokens": 120, "temperature": 0.0, **options})
        return AddRequest(name, tokenizer.encode(prompt).ids, params, float(order), fork_of=fork_of)

    following = [
        add(name, order, f"Tell me about a {name}, as JSON.", grammar=of_schema(schema))
        for order, (name, schema) in enumerate(SCHEMAS.items())
    ]
    random = {"temperature": 0.9, "seed": 3, "grammar": of_schema(CITY)}
    following += [
        add(f"choice{index}", 10, "A city, please.", "choice0" if index else "", choice_index=index, **random)
        for index in range(4)
    ]
    neighbours = [
        add("poem", 20, "Write a poem about the sea.", max_tokens=40, ignore_eos=True),
        add("story", 21, "Tell me a story.", max_tokens=40, temperature=0.8, seed=1, ignore_eos=True),
    ]
    return following, neighbours


def run(engine: InlineEngine, commands: list[AddRequest]) -> dict[str, RequestOutput]:
    return {command.request_id: end for command, end in zip(commands, engine.run(commands), strict=True)}


def tokens_of(ends: dict[str, RequestOutput]) -> dict[str, list[int]]:
    return {name: end.token_ids for name, end in ends.items()}


@pytest.fixture(scope="module")
def plain(make_engine, commands) -> dict[str, RequestOutput]:
    following, neighbours = commands
    return run(make_engine(*ALONE), [*following, *neighbours])


def check_city(city: dict[str, Any]) -> None:
    assert list(city) == CITY["required"]
    assert city["country"] in CITY["properties"]["country"]["enum"]
    assert isinstance(city["city"], str)
    assert len(city["city"]) <= 20
    assert isinstance(city["population"], int)
    assert isinstance(city["is_capital"], bool)


def test_every_answer_is_a_document_of_its_schema(plain, commands, tokenizer):
    documents = {}
    for command in commands[0]:
        end = plain[command.request_id]
        assert (end.error, end.finish_reason) == (None, FinishReason.STOP)
        assert end.token_ids[-1] == EOS
        documents[command.request_id] = json.loads(tokenizer.decode(end.token_ids[:-1], skip_special_tokens=False))
    for name in ("city", "choice0", "choice1", "choice2", "choice3"):
        check_city(documents[name])
    assert len({json.dumps(documents[f"choice{index}"]) for index in range(4)}) > 1
    assert len(documents["cities"]) == 2
    for city in documents["cities"]:
        check_city(city)
    assert documents["animal"]["legs"] in (0, 2, 4, 8)
    assert documents["animal"]["name"].isalpha()
    assert documents["date"].startswith("20")


def test_what_no_choice_is_left_about_is_spelt_as_the_tokenizer_spells_it(plain, tokenizer):
    token_ids = plain["city"].token_ids
    assert token_ids[:3] == tokenizer.encode('{"city": "').ids[:3]


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_gives_the_same_answers(make_engine, commands, plain, cell):
    engine = make_engine(*CELLS[cell])
    following, neighbours = commands
    assert tokens_of(run(engine, [*following, *neighbours])) == tokens_of(plain)
    stats = engine.core.stats()
    assert (stats.num_preemptions > 0) == (cell in ("recomputed", "swapped"))
    assert (stats.num_swapped_in_blocks > 0) == (cell == "swapped")


def test_neighbours_say_what_they_say_alone(make_engine, commands, plain):
    alone = run(make_engine(*ALONE), commands[1])
    assert tokens_of(alone) == {name: plain[name].token_ids for name in alone}
