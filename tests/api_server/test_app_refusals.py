"""What is refused, with which status, code and field: every rule on every route that it belongs to."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_rig import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Rig, running, says

from octavo.protocol.engine_messages import ErrorCode, FinishReason

CHAT, COMPLETIONS = PATHS = ("/v1/chat/completions", "/v1/completions")
USER = {"role": "user", "content": "Hi"}
SUBJECT = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "Hi"}}
JSON_HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("octavo")


@pytest.fixture
async def rig(directory: Path) -> AsyncIterator[Rig]:
    async with running(directory, says("Hello!"), max_choices=8, max_body_bytes=100_000) as rig:
        yield rig
        assert rig.server.admission.num_live_requests == 0


def check_error(answer: Any, code: str, param: str | None, *texts: str) -> None:
    assert answer.keys() == {"error"}
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert all(text in error["message"] for text in texts), error["message"]


def raw_body(path: str, field: str, value: str) -> bytes:
    """A valid body but for `field`, whose value is JSON or what passes for it."""
    members = {"model": json.dumps(MODEL), **{k: json.dumps(v) for k, v in SUBJECT[path].items()}, field: value}
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in members.items()) + "}").encode()


NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e309", '"NaN"', '"1"', "true", "false", "[]", "{}")
BAD_BIASES = (
    '{"99999999": 5}', '{"-1": 1}', '{"abc": 1}', '{"1.5": 1}', '{"": 1}', '{" 1": 1}', '{"\u0661": 1}',
    f'{{"{VOCAB_SIZE}": 1}}', '{"1": 101}', '{"1": -101}', '{"1": NaN}', '{"1": null}', '{"1": "5"}', "[[1, 5]]",
    json.dumps({str(number): 1 for number in range(1025)}), json.dumps({"9" * 5000: 1}), '{"1": 1, "01": 2}',
)  # fmt: skip
BAD_VALUES = {
    "temperature": (*NOT_NUMBERS, "-1", "-0.001", "1e30", "1001"),
    "top_p": (*NOT_NUMBERS, "-1", "0", "1.001", "1e30"),
    "min_p": (*NOT_NUMBERS, "-1", "1.001", "1e30"),
    "presence_penalty": (*NOT_NUMBERS, "-2.01", "2.01", "1e30"),
    "frequency_penalty": (*NOT_NUMBERS, "-2.01", "2.01", "1e30"),
    "repetition_penalty": (*NOT_NUMBERS, "-1", "0", "100.1", "1e30"),
    "top_k": (*NOT_NUMBERS, "-2", "2.5", "1e3", str(2**40), "9" * 30, "9" * 5000),
    "seed": (*NOT_NUMBERS, "-2", "1.5", str(2**63), "9" * 400),
    "n": (*NOT_NUMBERS, "0", "-1", "1.5", "9", str(2**40)),
    "max_tokens": (*NOT_NUMBERS, "-5", "1.5", "9" * 30),
    "min_tokens": (*NOT_NUMBERS, "-1", "17", "1.5"),
    "ignore_eos": ("1", '"true"', "[]"),
    "stream": ("1", '"true"', "[]"),
    "skip_special_tokens": ("0", '"false"'),
    "stop": ("1", "true", "{}", '""', '["a", ""]', "[1]", json.dumps(["a"] * 17), json.dumps("x" * 257)),
    "stop_token_ids": ("1", '"1"', '["1"]', "[true]", "[-1]", f"[{VOCAB_SIZE}]", "[1e3]", json.dumps([1] * 129)),
    "stream_options": ("1", "true", "[]", '{"include_usage": 1}', '{"include_usage": true}'),
    "model": ("null", "5", "true", "[]"),
    "logprobs": ("-1", "21", '"x"', "1.5"),
    "logit_bias": BAD_BIASES,
    "response_format": ('{"type": "json_object"}', '{"type": "xml"}', '"json_object"', "{}"),
    "use_beam_search": ("1", '"yes"', "[]"),
    "best_of": ("2", "0", "true", "1.5"),
    "length_penalty": (*NOT_NUMBERS, "0.5", "2"),
    "early_stopping": ("true", '"never"', '"always"', "1", "[]"),
    "priority": (*NOT_NUMBERS, "1", "-1", str(2**31), "9" * 30),
    "cache_salt": ("1", "true", "[]", json.dumps("x" * 129), '"caf\u00e9"', '"a\\nb"', '"\\u007f"'),
    "bad_words": ('"x"', '[""]', "[1]", json.dumps(["x"] * 65), json.dumps(["x" * 257])),
    "allowed_token_ids": ("[]", "[-1]", "[1.5]", "5", f"[{VOCAB_SIZE}]"),
    "prompt_logprobs": ("-1", "21", "true"),
    "truncate_prompt_tokens": ("0", "-2", "1.5", "true"),
    "return_token_ids": ("1",),
    "return_tokens_as_token_ids": ("1",),
    "user": ("5", json.dumps("x" * 129), '"caf\u00e9"'),
    "store": ("true",),
    "guided_regex": ('"a+"',),
    "logits_processors": ('["os.system"]',),
}
BAD_CHAT_VALUES = {
    "max_tokens": ("0",),
    "max_completion_tokens": (*NOT_NUMBERS, "0", "-5", "1.5", str(10**9)),
    "messages": ("null", "5", '"Hi"', "{}", "[]", "[5]", json.dumps([USER] * 2049)),
    "messages[0].role": tuple(f'[{{"role": {role}, "content": "x"}}]' for role in ('"robot"', '""', "null", "1")),
    "messages[0].content": ('[{"role": "user", "content": 5}]', '[{"role": "user", "content": {"type": "text"}}]'),
    "messages[0].content[0].type": (
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]',
        '[{"role": "user", "content": [{"type": "input_audio"}]}]',
    ),
    "messages[0].content[0].text": ('[{"role": "user", "content": [{"type": "text"}]}]',),
    "top_logprobs": ("2", "-1", "21", "true"),
    "echo": ("true",),
    "tools": ('[{"type": "function", "function": {"name": "f g"}}]', '[{"type": "web_search"}]', "{}"),
    "tool_choice": ('"required"', '{"type": "function", "function": {"name": "f"}}'),
    "modalities": ('["audio"]',),
    "add_generation_prompt": ("1",),
    "continue_final_message": ("true", "1"),
    "chat_template": ('"{{ 1 }}"',),
    "chat_template_kwargs": ('{"x": 1}', '{"enable_thinking": []}', "[]"),
    "reasoning_effort": ('"huge"', "1"),
}
BAD_COMPLETION_VALUES = {
    "prompt": ("null", "5", "true", "{}", "[]", "[[]]", '""', '["a", ""]', '[1, "a"]', '[[1], "a"]', '["a", 1]'),
    "prompt[0]": ("[true]", "[1.5]", "[null]"),
    "prompt[1][0]": ("[[1], [true]]", '[[1], ["a"]]'),
    "echo": ("1", '"yes"'),
    "logprobs": ("true", "false"),
    "suffix": ('"x"',),
    "prompt_embeds": ('"x"',),
}
CASES = [
    (path, param, value)
    for path, tables in ((CHAT, (BAD_VALUES, BAD_CHAT_VALUES)), (COMPLETIONS, (BAD_VALUES, BAD_COMPLETION_VALUES)))
    for table in tables
    for param, values in table.items()
    for value in values
]


async def test_b24_every_bad_value_of_every_field_is_refused_by_name(rig: Rig) -> None:
    for path, param, value in CASES:
        field = param.split("[")[0].split(".")[0]
        body = raw_body(path, field, value)
        if field == "min_tokens":
            body = body[:-1] + b', "max_tokens": 16}'
        status, answer = await rig.post(path, body)
        assert status == 400, (path, field, value[:80], answer)
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"].startswith(param), (path, value[:80], answer)
        assert param in answer["error"]["message"]
    assert rig.engine.added == []


@pytest.mark.parametrize("path", PATHS)
async def test_values_at_the_edge_of_their_range_pass(rig: Rig, path: str) -> None:
    fields = {
        "temperature": ["0", "1", "5", "2.0", "1000"],
        "top_p": ["1", "1e-9"],
        "top_k": ["-1", "0", "1", str(2**31 - 1)],
        "min_p": ["0", "1"],
        "seed": ["-1", "0", str(2**63 - 1)],
        "n": ["1", "8"],
        "best_of": ["1", "null"],
        "use_beam_search": ["false", "null"],
        "length_penalty": ["1", "1.0", "null"],
        "early_stopping": ["false", "null"],
        "priority": ["0", "null"],
        "cache_salt": ['""', "null", json.dumps("x" * 128), '" ~"'],
        "stop": ["[]", json.dumps(["x" * 256] * 16)],
        "stop_token_ids": ["[]", f"[0, {VOCAB_SIZE - 1}]"],
        "presence_penalty": ["0", "-0.0"],
        "repetition_penalty": ["1"],
        "response_format": ['{"type": "text"}'],
        "logprobs": ["null"],
        "logit_bias": ["{}", "null"],
        "model": ['"org/alias"'],
        "stream_options": ["null"],
        "user": ['"someone"', "null"],
        "unknown_field": ["[[[1]]]"],
    }
    for field, values in fields.items():
        for value in values:
            status, answer = await rig.post(path, raw_body(path, field, value))
            assert (status, answer.get("model")) == (200, MODEL), (field, value, answer)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_b53_unknown_models_are_not_found(rig: Rig, path: str, is_streamed: bool) -> None:
    for name in ("nope", "", "TINY", "tiny "):
        status, answer = await rig.post(path, {**SUBJECT[path], "model": name, "stream": is_streamed})
        assert status == 404
        check_error(answer, "model_not_found", "model")
    status, answer = await rig.post(path, {**SUBJECT[path], "stream": is_streamed})
    assert status == 400
    check_error(answer, "missing_required_parameter", "model")


async def test_b53_models_route(rig: Rig) -> None:
    async with rig.session.get("/v1/models") as response:
        listed = (await response.json())["data"]
    assert [model["id"] for model in listed] == [MODEL, "org/alias"]
    async with rig.session.get("/v1/models/org/alias") as response:
        model = await response.json()
    assert model.pop("created") > 0
    assert model == {"id": "org/alias", "object": "model", "owned_by": "octavo", "max_model_len": MAX_MODEL_LEN}
    async with rig.session.get("/v1/models/nope") as response:
        assert response.status == 404
        check_error(await response.json(), "model_not_found", "model")


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_without_its_subject_is_refused(rig: Rig, path: str) -> None:
    status, answer = await rig.post(path, {"model": MODEL})
    assert status == 400
    check_error(answer, "missing_required_parameter", next(iter(SUBJECT[path])))


@pytest.mark.parametrize("path", PATHS)
async def test_b31_context_errors_have_the_true_numbers(rig: Rig, path: str) -> None:
    overhead = 0
    if path == CHAT:
        await rig.chat("", max_tokens=1)
        overhead = len(rig.engine.added[0].prompt_token_ids)

    async def ask(num_prompt_tokens: int, max_tokens: int | None) -> tuple[int, Any]:
        text = "a" * (num_prompt_tokens - overhead)
        return await (rig.chat if path == CHAT else rig.complete)(text, max_tokens=max_tokens)

    limit, prompt = MAX_MODEL_LEN, 100
    status, _ = await ask(prompt, limit - prompt)
    assert status == 200
    status, answer = await ask(prompt, limit - prompt + 1)
    assert status == 400
    check_error(answer, "context_length_exceeded", "max_tokens", str(limit), str(prompt), str(limit - prompt + 1))
    for num_prompt_tokens, expected_status in ((limit - 1, 200), (limit, 400), (limit + 1, 400)):
        status, answer = await ask(num_prompt_tokens, None)
        assert status == expected_status
        if status == 400:
            subject = next(iter(SUBJECT[path]))
            check_error(answer, "context_length_exceeded", subject, str(limit), str(num_prompt_tokens))
    assert rig.engine.added[-1].sampling_params.max_tokens == 1


async def test_prompts_times_n_is_bounded(rig: Rig) -> None:
    status, answer = await rig.complete(["a", "b", "c"], n=3)
    assert status == 400
    check_error(answer, "invalid_value", "n", "9", "8")


async def test_token_ids_outside_the_vocabulary_are_refused(rig: Rig) -> None:
    for prompt in ([VOCAB_SIZE], [-1], [[1], [2**40]]):
        status, answer = await rig.complete(prompt)
        assert status == 400
        check_error(answer, "invalid_value", "prompt")


async def test_unknown_routes_and_methods_are_json_errors(rig: Rig) -> None:
    async with rig.session.get("/v1/nope") as response:
        assert response.status == 404
        check_error(await response.json(), "not_found", None)
    async with rig.session.get(CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        check_error(await response.json(), "method_not_allowed", None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_the_engines_refusal_is_a_400_with_its_numbers(tmp_path: Path, path: str, is_streamed: bool) -> None:
    script = says("", finish_reason=FinishReason.ERROR, error=ErrorCode.NEVER_FITS, error_message="needs 9 blocks of 4")
    async with running(tmp_path, script) as rig:
        status, answer = await rig.post(path, {"model": MODEL, **SUBJECT[path], "stream": is_streamed})
        assert status == 400
        check_error(answer, "context_length_exceeded", "max_tokens", "needs 9 blocks of 4")


@pytest.mark.parametrize(
    ("given", "is_echoed"),
    [("abc-1._Z", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("h:1", False)],
)
async def test_request_ids_are_echoed_or_replaced(rig: Rig, given: str, is_echoed: bool) -> None:
    for path in ("/health", "/v1/nope"):
        async with rig.session.get(path, headers={"X-Request-Id": given}) as response:
            echoed = response.headers["X-Request-Id"]
        assert (echoed == given) is is_echoed
        assert len(echoed) == len(given) if is_echoed else len(echoed) == 32


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:1", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example", 403)]
)
async def test_only_loopback_names_are_served_on_loopback(rig: Rig, host: str, status: int) -> None:
    async with rig.session.get("/v1/models", headers={"Host": host}) as response:
        assert response.status == status
