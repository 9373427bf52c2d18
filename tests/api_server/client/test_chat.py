"""`octavo chat` as a process: over a pipe, and at a terminal that a test holds the other end of."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_server import DONE, Answer, Body, ScriptedServer, event, says
from server_process import OCTAVO

PATIENCE_S = 30.0


def echoes(body: Body) -> list[bytes]:
    """Say how many messages there were and repeat the last one."""
    text = f"{len(body['messages'])}: {body['messages'][-1]['content']}"
    return [event(content=text), event("stop"), DONE]


def pipe(server: ScriptedServer, text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [OCTAVO, "chat", "--url", server.url, *arguments]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **environment}
    )


def test_each_line_of_a_pipe_is_a_question_of_one_conversation() -> None:
    with ScriptedServer(echoes).running() as server:
        result = pipe(server, "one\n\ntwo\nthree")
    assert (result.returncode, result.stdout, result.stderr) == (0, "1: one\n3: two\n5: three\n", "")
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1: one"},
        {"role": "user", "content": "two"},
    ]
    assert {body["model"] for body in server.bodies} == {"tiny"}


def test_commands() -> None:
    text = "one\n/reset\ntwo\n/system Be brief.\nthree\n/system\n/nonsense\n /four\n/help\n/quit\nfive\n"
    with ScriptedServer(echoes).running() as server:
        result = pipe(server, text, "--system", "Be kind.", "--model", "other")
    assert result.returncode == 0
    assert result.stdout == "2: one\n2: two\n4: three\n6:  /four\n"
    systems = [body["messages"][0]["content"] for body in server.bodies]
    assert systems == ["Be kind.", "Be kind.", "Be brief.", "Be brief."]
    assert {body["model"] for body in server.bodies} == {"other"}
    assert "octavo: Be brief.\noctavo: there is no command /nonsense" in result.stderr
    assert "forget what was said" in result.stderr


def test_a_question_may_have_several_lines() -> None:
    with ScriptedServer(echoes).running() as server:
        result = pipe(server, '"""\na\n\n  b\n"""\n"""c"""\n"""d\ne')
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["a\n\n  b", "c", "d\ne"]
    assert result.returncode == 0


def test_nothing_that_a_server_says_is_obeyed_by_a_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    with ScriptedServer(says("a", *evil, "b\n")).running() as server:
        result = pipe(server, "Hi\n")
    assert result.stdout == "a␛]0;owned␇␛[2J\N{REPLACEMENT CHARACTER}b\n"
    with ScriptedServer(lambda body: [f'data: {{"error": "{evil[1:3]}\\u001b[2J"}}\n\n'.encode()]).running() as server:
        result = pipe(server, "Hi\n")
    assert "\x1b" not in result.stdout + result.stderr


def test_thoughts_are_not_among_the_answers_of_a_pipe() -> None:
    stream = [event(reasoning_content="Hm\x1b[2J"), event(content="Hi"), event("stop"), DONE]
    with ScriptedServer(lambda body: stream).running() as server:
        result = pipe(server, "a\n")
    assert (result.stdout, result.stderr) == ("Hi\n", "Hm␛[2J\n")
    assert server.bodies[0]["messages"][-1]["content"] == "a"


def test_a_question_that_fails_is_told_taken_out_and_counts_in_the_status() -> None:
    def fails_once(body: Body) -> list[bytes]:
        return [b'data: {"error": {"message": "too much"}}\n\n'] if len(server.bodies) == 1 else echoes(body)

    with ScriptedServer(fails_once).running() as server:
        result = pipe(server, "one\ntwo\n")
    assert (result.returncode, result.stdout, result.stderr) == (1, "1: two\n", "octavo: too much\n")


def test_what_came_of_a_broken_answer_stays_in_the_conversation() -> None:
    with ScriptedServer(lambda body: [event(content="Hel")]).running() as server:
        result = pipe(server, "one\ntwo\n")
    assert result.returncode == 1
    assert result.stdout == "Hel\nHel\n"
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Hel"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "octavo: error: no server answers at http://127.0.0.1:1: "),
        (["--url", "nonsense"], "octavo: error: argument --url: must be a URL such as"),
        (["--api-key", "a b"], "octavo: error: argument --api-key: must be printable"),
    ],
)
def test_without_a_server_there_is_one_line_that_says_so(arguments: list[str], words: str) -> None:
    result = subprocess.run([OCTAVO, "chat", *arguments], input="Hi\n", capture_output=True, text=True, check=False)
    assert result.returncode in (1, 2)
    assert result.stderr.startswith(words)
    assert result.stderr.count("\n") == 1


def test_the_key_is_the_flags_or_else_the_environments() -> None:
    with ScriptedServer(says("Hi")).running() as server:
        pipe(server, "Hi\n", OCTAVO_API_KEY="from-environment")
        pipe(server, "Hi\n", "--api-key", "from-flag", OCTAVO_API_KEY="from-environment")
    assert server.keys == ["Bearer from-environment"] * 2 + ["Bearer from-flag"] * 2


def test_text_that_is_not_utf8_is_a_question_too() -> None:
    with ScriptedServer(echoes).running() as server:
        command = [OCTAVO, "chat", "--url", server.url]
        result = subprocess.run(command, input=b"a\xffb\n", capture_output=True, timeout=PATIENCE_S, check=True)
    assert result.stdout.decode() == "1: a\N{REPLACEMENT CHARACTER}b\n"


class Terminal:
    """A process with a terminal, and what it has shown."""

    def __init__(self, process: subprocess.Popen[Any], fd: int) -> None:
        self.process = process
        self.fd = fd
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until `text` is there; return what came before it and forget both."""
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            is_there, _, _ = select.select([self.fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert is_there, self.shown
            self.shown += os.read(self.fd, 4096).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before


@contextlib.contextmanager
def terminal(answer: Answer) -> Iterator[tuple[Terminal, ScriptedServer]]:
    ours, theirs = pty.openpty()
    with ScriptedServer(answer).running() as server:
        command = [OCTAVO, "chat", "--url", server.url]
        environment = {**os.environ, "TERM": "dumb"}
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
        )
        os.close(theirs)
        try:
            yield Terminal(process, ours), server
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def slowly(*pieces: str) -> Answer:
    def answer(body: Body) -> Iterator[bytes]:
        for piece in pieces:
            yield event(content=piece)
            time.sleep(0.02)
        while pieces[-1] == "…":  # for ever
            yield event(content="…")
            time.sleep(0.02)
        yield event("stop") + DONE

    return answer


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_program() -> None:
    answers: list[Callable[[Body], Any]] = [slowly("on and on", "…"), echoes]
    with terminal(lambda body: answers.pop(0)(body)) as (screen, server):
        screen.wait_for("/help lists commands")
        screen.type("first\n")
        screen.wait_for("on and on")
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("octavo: stopped")
        assert server.has_left.wait(10), "the server was told"
        screen.type("second\n")
        screen.wait_for("3: second")
        screen.wait_for("> ")
        time.sleep(0.3)  # readline has shown its prompt, and now waits for keys or a signal
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("octavo: stopped")
        screen.wait_for("> ")
        screen.type("\x04")
        assert screen.process.wait(PATIENCE_S) == 0
    assert server.bodies[1]["messages"][1]["content"].startswith("on and on")


def test_thoughts_are_dim_at_a_terminal_and_apart_from_the_answer() -> None:
    stream = [event(reasoning="Hm"), event(reasoning="."), event(content="Hi\x1b[2J"), event("stop"), DONE]
    with terminal(lambda body: stream) as (screen, _):
        screen.wait_for("> ")
        screen.type("q\n")
        screen.wait_for("\x1b[2mHm\x1b[0m\x1b[2m.\x1b[0m\r\n\r\nHi␛[2J\r\n")
        screen.type("/quit\n")
        assert screen.process.wait(PATIENCE_S) == 0
