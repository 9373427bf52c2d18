"""Arguments of past calls: what a client may tell of them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.api_server.conversation.messages import MAX_ARGUMENTS_DEPTH, decode_arguments
from octavo.api_server.errors import ApiError


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(("text", "arguments"), [(None, {}), ("", {}), ('{"a": [1, "é"]}', {"a": [1, "é"]})])
def test_arguments(text: str | None, arguments: dict[str, Any]) -> None:
    assert decode_arguments(text, "p") == arguments
    assert decode_arguments(nested(MAX_ARGUMENTS_DEPTH), "p")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[1]", "the text of a JSON object"),
        ("{'a': 1}", "the text of a JSON object"),
        ('{"a": NaN}', "the text of a JSON object"),
        ('{"a": "\\ud800"}', "the text of a JSON object"),
        (nested(MAX_ARGUMENTS_DEPTH + 1), "nested more than 64 levels deep"),
        (nested(100_000), "nested more than 64 levels deep"),
        ('{"a":' + "[" * 100_000, "nested more than 64 levels deep"),
    ],
)
def test_what_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ApiError) as found:
        decode_arguments(text, "p.arguments")
    assert (found.value.status, found.value.param) == (400, "p.arguments")
    assert rule in found.value.message
