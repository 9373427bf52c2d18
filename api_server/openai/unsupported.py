"""Fields of OpenAI's and vLLM's API that would change the answer and that this server does not have yet.

Ignoring them would give another answer than the client asked for, so they are refused by name; a value that changes
nothing passes. A feature that arrives takes its line out of this table.
"""

from __future__ import annotations

from typing import Any

from octavo.api_server.errors import unsupported
from octavo.api_server.openai.schemas import GenerationRequest

NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "logprobs": (False,),
    "echo": (False,),
    "top_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "suffix": ("",),
    "prompt_embeds": (),
}


def check_supported(body: GenerationRequest) -> None:
    """Raise ApiError for the first field that asks for more than its no-op."""
    for name, no_op_values in NO_OP_VALUES.items():
        value = getattr(body, name, None)
        if value is None:
            continue
        if not any(type(value) is type(no_op) and value == no_op for no_op in no_op_values):
            raise unsupported(name)
