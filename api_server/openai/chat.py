"""POST /v1/chat/completions: the shape of its answers."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.api_server.openai.answer import Envelope, FinishedChoice
from octavo.api_server.openai.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    Usage,
)


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(self, model: str, has_usage: bool) -> None:
        self.envelope = Envelope.create("chatcmpl-", model, has_usage)

    def opening_chunk(self, index: int) -> ChatChunk:
        return self._chunk(ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""), finish_reason=None))

    def text_chunk(self, index: int, text: str) -> ChatChunk:
        return self._chunk(ChatChunkChoice(index=index, delta=Delta(content=text), finish_reason=None))

    def finish_chunk(self, index: int, finish_reason: str, stop_reason: str | int | None) -> ChatChunk:
        return self._chunk(
            ChatChunkChoice(index=index, delta=Delta(), finish_reason=finish_reason, stop_reason=stop_reason)
        )

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self.envelope.fields("chat.completion.chunk"), choices=[], usage=usage)

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            **self.envelope.fields("chat.completion"),
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(content=choice.text),
                    logprobs=None,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        fields = self.envelope.fields("chat.completion.chunk")
        return ChatChunk(**fields, choices=[choice], usage=self.envelope.usage)
