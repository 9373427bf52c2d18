"""Lets requests that follow the schema get past rules that only its words say: models, roles, what goes together.

Requests that are made to break the schema stay as they are. Without this nearly all conversations that schemathesis
makes up are refused for a role called "0", and no answer is ever checked.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL = "smollm2-135m"
MESSAGE = {"role": "user", "content": "Hi"}
IN_COMPANY_ONLY = frozenset({"use_beam_search", "stream_options", "tool_choice", "chat_template_kwargs", "best_of"})
MAX_TOKENS = 16


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if isinstance(case.body, dict) and not case.meta.generation.mode.is_negative:
        case.body = with_words_heeded(case.body, open_fields(case))


def with_words_heeded(body: dict[str, Any], refused: frozenset[str]) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name not in refused | IN_COMPANY_ONLY}
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            body[name] = [MESSAGE]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], MAX_TOKENS)
    return body


def open_fields(case: schemathesis.Case) -> frozenset[str]:
    """Fields that may be of any type: those that the server refuses by name."""
    document = case.operation.schema.raw_schema
    content = document["paths"][case.operation.path][case.method.lower()]["requestBody"]["content"]
    schema = document["components"]["schemas"][content["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    fields = schema["properties"].items()
    return frozenset(name for name, field in fields if not field.keys() - {"default", "description"})
