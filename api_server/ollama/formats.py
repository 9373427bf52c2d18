"""POST /api/chat and POST /api/generate: their bodies in both directions."""

from __future__ import annotations

from octavo.api_server.generation.job import Draft
from octavo.api_server.generation.run import Run
from octavo.api_server.ollama.answer import OllamaRenderer, chat_answer, generate_answer
from octavo.api_server.ollama.drafts import chat_draft, generate_draft
from octavo.api_server.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest


class OllamaChatFormat:
    """The bodies of /api/chat."""

    body_type = OllamaChatRequest

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def draft(self, body: OllamaChatRequest) -> Draft:
        return chat_draft(body)

    def renderer(self, body: OllamaChatRequest, run: Run) -> OllamaRenderer:
        return OllamaRenderer(chat_answer, self.model_name, run)


class OllamaGenerateFormat:
    """The bodies of /api/generate."""

    body_type = OllamaGenerateRequest

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def draft(self, body: OllamaGenerateRequest) -> Draft:
        return generate_draft(body)

    def renderer(self, body: OllamaGenerateRequest, run: Run) -> OllamaRenderer:
        return OllamaRenderer(generate_answer, self.model_name, run)
