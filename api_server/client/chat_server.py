"""A server to talk to: its models, and answers in pieces as they come.

The standard library's blocking HTTP is enough for one answer at a time, and Ctrl-C interrupts a read wherever it is.
Invariant: an answer's connection is closed when its iteration ends, however it ends, which has the server stop.
"""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from octavo.api_server.client.stream_events import DONE, MAX_LINE_BYTES, data_of, decode_event, error_text

LIST_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0  # without a byte: a busy server may take long for the first one
MAX_BODY_BYTES = 2**20

Message = Mapping[str, str]


class ChatProblemError(Exception):
    """There is no answer, or no more of it; the text says why."""


class UnreachableError(ChatProblemError):
    """Nothing speaks HTTP at the URL."""


class Piece(NamedTuple):
    """More of an answer: text of what the model thinks, or of what it says."""

    text: str
    is_thought: bool = False


class ModelName(msgspec.Struct):
    id: str


class ModelNames(msgspec.Struct):
    data: list[ModelName]


class ChatServer:
    """One server with OpenAI's API."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url` may end with /v1. Raises ValueError for what is no URL of a server."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL such as http://127.0.0.1:8000")
        self.url = url
        self._type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = (parts.hostname, parts.port)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def model_names(self) -> list[str]:
        """Return the names that the server knows, at least one. Raises ChatProblemError."""
        connection = self._connection(LIST_TIMEOUT_S)
        try:
            response = self._send(connection, "GET", "/models")
            names = [model.id for model in msgspec.json.decode(response.read(MAX_BODY_BYTES), type=ModelNames).data]
        except (OSError, http.client.HTTPException) as problem:
            raise UnreachableError(f"no server answers at {self.url}: {problem}") from problem
        except msgspec.MsgspecError as problem:
            raise ChatProblemError(f"{self.url} does not answer as OpenAI's API does") from problem
        finally:
            connection.close()
        if not names:
            raise ChatProblemError(f"{self.url} has no model")
        return names

    def answer(self, model: str, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Yield the pieces of the answer to `messages`. Raises ChatProblemError."""
        body = {"model": model, "messages": messages, "stream": True}
        connection = self._connection(ANSWER_TIMEOUT_S)
        try:
            yield from _pieces(self._send(connection, "POST", "/chat/completions", body))
        except (OSError, http.client.HTTPException) as problem:
            raise ChatProblemError(f"the connection broke: {type(problem).__name__}: {problem}") from problem
        except msgspec.MsgspecError as problem:
            raise ChatProblemError("the answer is not a stream of OpenAI's API") from problem
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._address
        return self._type(host, port, timeout=timeout_s)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        """Return the response once its status is known to be 200; raises ChatProblemError for another."""
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        connection.request(method, self._path + path, data, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ChatProblemError(_refusal(response.status, response.read(MAX_BODY_BYTES)))
        return response


def _pieces(response: http.client.HTTPResponse) -> Iterator[Piece]:
    """Yield the text of a stream up to its end. Raises ChatProblemError."""
    while line := response.readline(MAX_LINE_BYTES):
        data = data_of(line)
        if data is None:
            continue
        if data == DONE:
            return
        event = decode_event(data)
        if event.error is not None:
            raise ChatProblemError(error_text(event.error))
        for choice in event.choices:
            if choice.thought:
                yield Piece(choice.thought, is_thought=True)
            if choice.content:
                yield Piece(choice.content)
            if choice.finish_reason == "length":
                raise ChatProblemError("the answer is cut off: the model's context has no room for more")
    raise ChatProblemError("the stream ended before the answer did")


def _refusal(status: int, body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return f"HTTP {status}"
    return f"HTTP {status}: {error_text(answer.get('error', answer))}"
