"""The replay engine: what a script may be, who gets which answer, and that scheduling never changes one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scheduler_harness
import tokenizers
from http_rig import EOS_ID, VOCAB_SIZE, write_tokenizer

from octavo.engine_core.engine_core import EngineCore
from octavo.protocol.codec import decode_scheduler_output, decode_worker_event, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams, ErrorCode, FinishReason, RequestOutput
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.logprobs import NO_ENTRY
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, NewRequest, SchedulerOutput, WorkerReady
from octavo.worker.replay.__main__ import load_replayer, num_device_blocks, sleep_until
from octavo.worker.replay.logprob_table import LogprobTable

OWNER = b"api-0"
STORY = "Once upon a time there was a block table, and it was full. "
Line = dict[str, Any]


def make_config(
    directory: Path, script: str, eos_token_ids: tuple[int, ...] = (EOS_ID,), **limits: Any
) -> EngineConfig:
    path = directory / "script.jsonl"
    path.write_text(script)
    config = scheduler_harness.make_config(vocab_size=VOCAB_SIZE, eos_token_ids=eos_token_ids, **limits)
    model = msgspec.structs.replace(config.model, path=write_tokenizer(directory))
    return msgspec.structs.replace(config, model=model, replay_script=str(path))


class Played:
    """An engine core with a replayer behind it. Each result comes only when as many steps as may be are in flight."""

    def __init__(self, directory: Path, *lines: Line, **limits: Any) -> None:
        config = make_config(directory, "\n".join(map(json.dumps, lines)), **limits)
        self.tokenizer = tokenizers.Tokenizer.from_file(f"{config.model.path}/tokenizer.json")
        self.replayer = load_replayer(config)
        memory = WorkerReady(0, num_device_blocks(config), config.cache.num_host_blocks or 0)
        self.core = EngineCore(config, self, memory)
        self.frames: deque[bytes] = deque()
        self.results: list[ModelRunnerOutput] = []
        self.durations_s: list[float] = []
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}

    def execute(self, step: SchedulerOutput) -> None:
        played = self.replayer.execute(decode_scheduler_output(encode(step)))
        self.durations_s.append(played.duration_s)
        self.frames.append(encode(played.output))

    def add(self, request_id: str, prompt: str, beams: BeamSearchParams | None = None, **params: Any) -> None:
        prompt_token_ids = self.tokenizer.encode(prompt).ids
        sampling_params = SamplingParams(**{"max_tokens": 30, **params})
        self.core.add(OWNER, AddRequest(request_id, prompt_token_ids, sampling_params, 0.0, beam_search=beams))

    def run(self) -> None:
        """Run until nothing is left to do."""
        self.core.step()
        while self.frames:
            result = decode_worker_event(self.frames.popleft())
            assert isinstance(result, ModelRunnerOutput)
            self.results.append(result)
            self.core.update(result)
            for output in self.core.take_outputs().get(OWNER, []):
                self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output
            self.core.step()
        self.core.check_idle()

    def say(self, prompt: str, **params: Any) -> tuple[str, FinishReason | None]:
        """Run one request; return its text and how it ended."""
        self.add("a", prompt, **params)
        self.run()
        return self.text("a"), self.ends["a"].finish_reason

    def text(self, request_id: str) -> str:
        return self.tokenizer.decode(self.outputs[request_id], skip_special_tokens=True)


def test_the_first_line_that_fits_the_prompt_answers(tmp_path: Path) -> None:
    lines: list[Line] = [
        {"prompt_contains": "<|im_start|>user\nBye", "text": "Farewell"},
        {"prompt_contains": "Bye", "text": "no"},
        {"text": "Zdrávo 日本 😀"},
    ]
    assert Played(tmp_path, *lines).say("<|im_start|>user\nBye") == ("Farewell", FinishReason.STOP)
    assert Played(tmp_path, *lines).say("say Bye") == ("no", FinishReason.STOP)
    assert Played(tmp_path, *lines).say("x") == ("Zdrávo 日本 😀", FinishReason.STOP)


def test_an_answer_ends_with_eos_or_begins_again(tmp_path: Path) -> None:
    for eos, is_stop in ((False, True), (True, False)):
        played = Played(tmp_path, {"text": "ab"})
        assert played.say("x", ignore_eos=eos) == ("ab", FinishReason.STOP if is_stop else FinishReason.LENGTH)
    assert Played(tmp_path, {"text": "abc", "ends": False}).say("x", max_tokens=7) == ("abcabca", FinishReason.LENGTH)
    assert Played(tmp_path, {"text": ""}).say("x") == ("", FinishReason.STOP)
    assert Played(tmp_path, {"token_ids": [3, EOS_ID, 4], "ends": False}).say("x")[1] is FinishReason.STOP


def test_each_choice_has_its_text_and_begins_again_with_the_first(tmp_path: Path) -> None:
    played = Played(tmp_path, {"texts": ["one", "two"]})
    for index in range(3):
        played.add(str(index), "x", choice_index=index)
    played.run()
    assert [played.text(str(index)) for index in range(3)] == ["one", "two", "one"]


@pytest.mark.parametrize("is_beam_search", [False, True])
@pytest.mark.parametrize("num_words", [1, 30])
def test_a_prompt_without_a_line_fails_alone(tmp_path: Path, is_beam_search: bool, num_words: int) -> None:
    played = Played(tmp_path, {"prompt_contains": "yes", "text": "fine"})
    search = BeamSearchParams(num_beams=3, num_choices=3) if is_beam_search else None
    played.add("good", "yes " * 30)
    played.add("bad", "no " * num_words, search, num_logprobs=1)
    played.add("also good", "yes")
    played.run()
    assert (played.ends["bad"].finish_reason, played.ends["bad"].error) == (
        FinishReason.ERROR,
        ErrorCode.INTERNAL_ERROR,
    )
    assert played.outputs["bad"] == []
    assert played.text("good") == played.text("also good") == "fine"
    assert sum("bad" in result.errors for result in played.results) == 1
    assert not any("bad" in result.logprobs for result in played.results)


@pytest.mark.parametrize("limits", [{"num_device_blocks": 24}, {"num_device_blocks": 24, "num_host_blocks": 64}])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("ends", [True, False])
def test_preemptions_and_steps_in_flight_change_no_answer(
    tmp_path: Path, limits: dict[str, int], max_steps_in_flight: int, ends: bool
) -> None:
    lines = [{"prompt_contains": f"number {index}", "text": STORY[index:], "ends": ends} for index in range(6)]
    played = Played(tmp_path, *lines, max_steps_in_flight=max_steps_in_flight, max_num_batched_tokens=16, **limits)
    for index in range(6):
        played.add(str(index), f"number {index}", max_tokens=70, num_logprobs=2)
    played.run()
    assert played.core.stats().num_preemptions > 0, "the pool was not small enough to prove anything"
    for index in range(6):
        expected = STORY[index:] if ends else (STORY[index:] * 2)[:70]
        assert played.text(str(index)) == expected


def step_of(num_scheduled_tokens: dict[str, int], *new_requests: NewRequest) -> SchedulerOutput:
    return SchedulerOutput(0, [], [], list(new_requests), [], [], [], num_scheduled_tokens)


def test_a_row_may_be_scheduled_by_name_for_every_token(tmp_path: Path) -> None:
    replayer = Played(tmp_path, {"token_ids": [7, 8, 9]}).replayer
    new = NewRequest("a", [1, 2, 3], [7], SamplingParams(max_tokens=5), [0], 1)
    assert replayer.execute(step_of({"a": 2}, new)).output.sampled_token_ids == []
    assert replayer.execute(step_of({"a": 1})).output.sampled_token_ids == [8]
    assert replayer.execute(step_of({"a": 1})).output.sampled_token_ids == [9]
    for wrong in ({"a": 2}, {"a": 0}):
        with pytest.raises(ValueError, match="the step reaches token"):
            Played(tmp_path, {"text": "x"}).replayer.execute(
                step_of(wrong, msgspec.structs.replace(new, num_computed_tokens=3))
            )
    with pytest.raises(KeyError):
        replayer.execute(step_of({"b": 1}))


def test_logprobs_are_a_table_of_the_token(tmp_path: Path) -> None:
    played = Played(tmp_path, {"token_ids": [5, VOCAB_SIZE - 2], "logprob": -0.25}, max_steps_in_flight=1)
    played.add("a", "x", num_logprobs=3)
    played.add("plain", "x")
    played.run()
    found = [row for result in played.results if "a" in result.logprobs for row in result.logprobs["a"].rows()]
    assert found == [
        ([5, 5, 6, 7], [-0.25, -0.25, -1.25, -2.25]),
        ([VOCAB_SIZE - 2, VOCAB_SIZE - 2, VOCAB_SIZE - 1, 0], [-0.25, -0.25, -1.25, -2.25]),
        ([EOS_ID, EOS_ID, 0, 1], [-0.25, -0.25, -1.25, -2.25]),
    ]
    assert not any("plain" in result.logprobs for result in played.results)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prompt_logprobs_are_the_same_for_every_chunk(tmp_path: Path, chunk: int) -> None:
    played = Played(tmp_path, {"text": "ok"}, max_tokens_per_request=chunk)
    played.add("a", "prompt", num_prompt_logprobs=1)
    played.run()
    parts = [result.prompt_logprobs["a"] for result in played.results if "a" in result.prompt_logprobs]
    prompt = played.tokenizer.encode("prompt").ids
    positions = [part.first_position + index for part in parts for index in range(part.rows.num_rows)]
    assert positions == list(range(1, len(prompt)))
    assert [token_ids[0] for part in parts for token_ids, _ in part.rows.rows()] == prompt[1:]


def test_a_small_vocabulary_leaves_entries_empty() -> None:
    (row,) = LogprobTable(-1.0, 2).rows([1], 3).rows()
    assert row == ([1, 1, 0, NO_ENTRY], [-1.0, -1.0, -2.0, -math.inf])


def test_a_beam_search_goes_along_the_answer(tmp_path: Path) -> None:
    played = Played(tmp_path, {"text": "beam"})
    played.add("a", "x", BeamSearchParams(num_beams=2, num_choices=2))
    played.run()
    best = played.ends["a"].beams[0]
    assert played.tokenizer.decode(best.token_ids, skip_special_tokens=True) == "beam"
    assert best.finish_reason is FinishReason.STOP


def test_a_step_takes_the_longest_interval_of_those_that_get_a_token(tmp_path: Path) -> None:
    played = Played(
        tmp_path,
        {"prompt_contains": "slow", "text": "ab", "interval_ms": 20},
        {"prompt_contains": "slower", "text": "no"},
        {"prompt_contains": "quick", "text": "abcdef", "interval_ms": 5},
        max_steps_in_flight=1,
    )
    played.add("slow", "slower")
    played.add("quick", "quick")
    played.run()
    assert [duration for duration in played.durations_s if duration] == [0.02] * 3 + [0.005] * 4


def test_the_pace_makes_up_for_a_late_step() -> None:
    now_s = time.monotonic()
    assert sleep_until(now_s + 0.02) == now_s + 0.02
    assert time.monotonic() >= now_s + 0.02
    assert sleep_until(now_s) > now_s + 0.02, "what is long over counts from now"


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("", "has no lines"),
        ("\n\n", "has no lines"),
        ('{"text": "a"}\n{"text": "b", "temperature": 1}', "line 2: Object contains unknown field `temperature`"),
        ('\n{"text": "a"}\n\n{"text": 5}', "line 4: Expected `str | null`, got `int` - at `$.text`"),
        ('{"text": "a"}\n{"text"', "line 2: "),
        ('{"text": "\udcff"}', "line 1: "),
        ("[]", "line 1: Expected `object`"),
        ("{}", "line 1: a line has exactly one of text, texts and token_ids"),
        ('{"text": "a", "token_ids": [1]}', "line 1: a line has exactly one of"),
        ('{"texts": []}', "line 1: Expected `array` of length >= 1"),
        ('{"token_ids": [-1]}', "line 1: Expected `int` >= 0"),
        ('{"text": "a"}\n{"token_ids": [1, 259]}', "line 2: a token id is not below the model's vocab_size, 259"),
        ('{"text": "", "ends": false}', "line 1: an answer that does not end needs tokens"),
        ('{"texts": ["a", ""], "ends": false}', "line 1: an answer that does not end needs tokens"),
        ('{"text": "a", "interval_ms": -1}', "line 1: Expected `float` >= 0"),
        ('{"text": "a", "logprob": 0.5}', "line 1: Expected `float` <= 0"),
    ],
)
def test_a_wrong_script_is_refused_with_the_number_of_its_line(tmp_path: Path, script: str, named: str) -> None:
    config = make_config(tmp_path, "")
    Path(str(config.replay_script)).write_bytes(script.encode(errors="surrogateescape"))
    with pytest.raises(StartupError) as refused:
        load_replayer(config)
    assert refused.value.exit_code is ExitCode.USAGE
    assert named in refused.value.message


def test_an_answer_that_ends_needs_an_eos_token(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no EOS token"):
        load_replayer(make_config(tmp_path, '{"text": "a"}', eos_token_ids=()))
    load_replayer(make_config(tmp_path, '{"text": "a", "ends": false}', eos_token_ids=()))


def test_blocks_are_enough_for_the_longest_request_unless_their_number_is_given(tmp_path: Path) -> None:
    config = make_config(tmp_path, "")
    assert num_device_blocks(config) == 64
    free = msgspec.structs.replace(config.cache, num_device_blocks=None)
    model = msgspec.structs.replace(config.model, max_model_len=2**20)
    assert num_device_blocks(msgspec.structs.replace(config, cache=free, model=model)) == 2**20 // 4


def test_the_worker_imports_neither_torch_nor_numpy() -> None:
    program = "import sys, octavo.worker.replay.__main__; print(*{'torch', 'numpy', 'transformers'} & {*sys.modules})"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == ""


def test_a_steady_row_costs_less_than_a_microsecond(tmp_path: Path) -> None:
    played = Played(
        tmp_path, {"text": STORY, "ends": False}, max_num_seqs=200, max_num_batched_tokens=2000, num_device_blocks=4000
    )
    for index in range(200):
        played.add(str(index), "x", max_tokens=200)
    played.core.step()
    step = SchedulerOutput(99, [], [], [], [], [], [], {})
    assert len(played.replayer.steady) == 200
    durations_s = []
    for _ in range(200):
        started_s = time.perf_counter()
        played.replayer.execute(step)
        durations_s.append(time.perf_counter() - started_s)
    assert min(durations_s) / 200 < 1e-6
