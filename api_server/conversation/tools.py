"""Tools that a client offers, and which of them the model may or must call: OpenAI's fields, and what we check of them.

Limits are ours: at most 128 tools, parameters of at most 64 KiB and 32 levels. Whether the parameters are a JSON schema
is not checked here: prompts and parsers only read them, and a grammar made of them is checked where grammars are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api_server.errors import ApiError, ErrorKind, invalid_value, unsupported

MAX_TOOLS = 128
MAX_NAME_LENGTH = 64
MAX_PARAMETERS_BYTES = 64 * 1024
MAX_PARAMETERS_DEPTH = 32
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class FunctionSpec(msgspec.Struct, kw_only=True):
    """`function` of a tool.

    Attributes:
        parameters: JSON schema of the arguments; None means that there are none.
        strict: the arguments of a forced call keep to the schema in every keyword, instead of where we can.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One entry of `tools`."""

    type: str = "function"
    function: FunctionSpec

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments; empty when the client gave none."""
        return self.function.parameters or {}
