"""What of tools the routes that answer in blocks cannot do: show them to the model, and make it call."""

from __future__ import annotations

from octavo.api_server.conversation.tools import ToolUse
from octavo.api_server.errors import unsupported


def check_tool_support(use: ToolUse) -> None:
    """Raise ApiError unless the model is to see no tools."""
    if use.is_forced:
        raise unsupported("tool_choice", "cannot demand a call on this server")
    if use.tools:
        raise unsupported("tools", "cannot be called on this route of this server; tool_choice none is allowed")
