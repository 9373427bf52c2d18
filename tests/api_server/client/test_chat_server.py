"""The chat's side of HTTP: pieces of an answer as they come, and every way in which there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

import pytest
from scripted_server import DONE, Answer, Body, ScriptedServer, event, says

from octavo.api_server.client.chat_server import ChatProblemError, ChatServer, Piece, UnreachableError

QUESTION = [{"role": "user", "content": "Hi"}]


def pieces_of(answer: Answer, api_key: str | None = None) -> list[Piece]:
    with ScriptedServer(answer).running() as server:
        return list(ChatServer(server.url, api_key).answer("tiny", QUESTION))


def test_thoughts_and_words_come_as_they_are_said() -> None:
    stream = [
        b": keep-alive\n\nevent: x\n",
        event(role="assistant", content=""),
        event(reasoning_content="Hm", reasoning="Hm"),
        event(reasoning="!"),
        event(content="Grüezi "),
        event(content="🌍"),
        event("stop"),
        DONE,
        event(content="behind the end"),
    ]
    assert pieces_of(lambda body: stream) == [
        Piece("Hm", is_thought=True),
        Piece("!", is_thought=True),
        Piece("Grüezi "),
        Piece("🌍"),
    ]


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        ([event(content="Hi")], "the stream ended before the answer did"),
        ([b'data: {"error": {"message": "lost its weights"}}\n\n'], "lost its weights"),
        ([b'data: {"error": "a text"}\n\n'], "a text"),
        ([b"data: no JSON\n\n"], "not a stream"),
        ([event(content="Hi"), event("length"), DONE], "cut off"),
    ],
)
def test_an_answer_that_is_not_whole_says_why(stream: list[bytes], problem: str) -> None:
    with pytest.raises(ChatProblemError, match=problem):
        pieces_of(lambda body: stream)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"error": {"message": "no such model"}}', "HTTP 404: no such model"),
        (b'{"detail": "x"}', "HTTP 404: {'detail': 'x'}"),
        (b"<html>", "HTTP 404"),
    ],
)
def test_a_refusal_says_what_the_server_says(body: bytes, problem: str) -> None:
    server = ScriptedServer(lambda _: [body])
    server.status = 404
    with server.running(), pytest.raises(ChatProblemError) as caught:
        list(ChatServer(server.url, None).answer("other", QUESTION))
    assert str(caught.value) == problem


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_that_of_the_api(path: str) -> None:
    with ScriptedServer(says("Hi")).running() as server:
        chat = ChatServer(server.url + path, "secret")
        assert chat.model_names() == ["tiny"]
        assert list(chat.answer("tiny", QUESTION)) == [Piece("Hi")]
    assert server.paths == ["/v1/models", "/v1/chat/completions"]
    assert server.keys == ["Bearer secret"] * 2
    assert server.bodies == [{"model": "tiny", "messages": QUESTION, "stream": True}]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        ChatServer(url, None)


@pytest.mark.parametrize(
    ("models", "problem"), [(b"{}", "does not answer as"), (b'{"data": []}', "no model"), (b"\xff", "does not answer")]
)
def test_a_server_of_another_kind_is_told_apart(models: bytes, problem: str) -> None:
    with ScriptedServer(says(), models).running() as server, pytest.raises(ChatProblemError, match=problem):
        ChatServer(server.url, None).model_names()


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with pytest.raises(UnreachableError, match="Connection refused"):
        ChatServer("http://127.0.0.1:1", None).model_names()


def test_the_connection_ends_with_the_iteration() -> None:
    def endless(body: Body) -> Iterator[bytes]:
        while True:
            yield event(content="x" * 1000)
            time.sleep(0.001)

    with ScriptedServer(endless).running() as server:
        with contextlib.closing(ChatServer(server.url, None).answer("tiny", QUESTION)) as pieces:
            assert next(pieces).text[0] == "x"
        assert server.has_left.wait(10)


def test_a_break_in_the_middle_keeps_what_came() -> None:
    def breaking(body: Body) -> Iterable[bytes]:
        yield event(content="Hel")
        yield b"data: {"

    with ScriptedServer(breaking).running() as server:
        pieces = ChatServer(server.url, None).answer("tiny", QUESTION)
        assert next(pieces) == Piece("Hel")
        with pytest.raises(ChatProblemError):
            next(pieces)
