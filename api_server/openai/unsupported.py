"""Fields of OpenAI's and vLLM's API that would change the answer and that this server does not have.

Ignoring them would give another answer than the client asked for, so they are refused by name; a value that changes
nothing passes. A feature that arrives takes its line out of these tables.
"""

from __future__ import annotations

from typing import Any

from octavo.api_server.errors import unsupported
from octavo.api_server.openai.common_schemas import GenerationFields

NoOps = dict[str, tuple[Any, ...]]

GENERATION_NO_OPS: NoOps = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "store": (False,),
}
CHAT_NO_OPS: NoOps = {
    **GENERATION_NO_OPS,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
}
COMPLETION_NO_OPS: NoOps = {
    **GENERATION_NO_OPS,
    "suffix": ("",),
    "prompt_embeds": (),
}


def check_supported(body: GenerationFields, no_ops: NoOps) -> None:
    """Raise ApiError for the first field of `no_ops` that asks for more than its no-op."""
    for name, no_op_values in no_ops.items():
        value = getattr(body, name)
        if value is None:
            continue
        if not any(type(value) is type(no_op) and value == no_op for no_op in no_op_values):
            raise unsupported(name)
