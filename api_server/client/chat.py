"""`octavo chat`: a conversation with a server, in a terminal or over a pipe.

The conversation is ours: each question goes out with all that was said before, and the server keeps nothing. An answer
that was stopped or broke off stays in it as far as it came; a question without any answer is taken out again, so that
user and assistant go on taking turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from octavo.api_server.client.chat_screen import FENCE, Screen
from octavo.api_server.client.chat_server import ChatProblemError, ChatServer, UnreachableError
from octavo.api_server.client.flags import DEFAULT_URL, INTERRUPTED, add_api_key_flag
from octavo.api_server.options import Parser
from octavo.protocol.lifecycle import ExitCode

DESCRIPTION = """Talk to a running server. Ctrl-C stops an answer, Ctrl-D ends. When standard input is a pipe, each line
of it is a question, and standard output has the answers."""
HELP = f"""/reset          forget what was said
/system [TEXT]  show what the system says, or say TEXT from now on
/quit           end, as Ctrl-D does
/help           show this
{FENCE} begins and ends a question of several lines. A line that begins with a space is no command."""


class Conversation:
    """What was said, and what the system says before it."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    def messages_with(self, question: str) -> list[dict[str, str]]:
        """Return what the model is to answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


class Chat:
    """One conversation with one model."""

    def __init__(self, server: ChatServer, model: str, system: str | None, screen: Screen) -> None:
        self.server = server
        self.model = model
        self.conversation = Conversation(system)
        self.screen = screen
        self.num_problems = 0

    def run(self) -> None:
        """Take turns until there are no more questions. At a terminal Ctrl-C ends a turn, wherever it is."""
        goes_on = True
        while goes_on:
            try:
                goes_on = self._take_turn()
            except KeyboardInterrupt:
                if not self.screen.is_terminal:
                    raise
                self.screen.note("stopped; Ctrl-D or /quit ends")

    def _take_turn(self) -> bool:
        """Read a question or a command, and do what it says; return whether the conversation goes on."""
        question = self.screen.read_question()
        if question is None:
            return False
        if question.startswith("/"):
            return self._obey(*question.split(maxsplit=1))
        if question.strip():
            self._ask(question)
        return True

    def _obey(self, command: str, text: str = "") -> bool:
        """Do what a command says; return whether the conversation goes on."""
        match command:
            case "/quit":
                return False
            case "/reset":
                self.conversation.turns.clear()
            case "/system" if text:
                self.conversation.system = text
            case "/system":
                self.screen.note(self.conversation.system or "the system says nothing")
            case "/help":
                self.screen.note(f"commands\n{HELP}")
            case _:
                self.screen.note(f"there is no command {command}; /help lists them")
        return True

    def _ask(self, question: str) -> None:
        answer = ""
        try:
            with contextlib.closing(
                self.server.answer(self.model, self.conversation.messages_with(question))
            ) as pieces:
                for piece in pieces:
                    if piece.is_thought:
                        self.screen.show_thought(piece.text)
                    else:
                        answer += piece.text  # before it is shown: Ctrl-C may come in between
                        self.screen.show_answer(piece.text)
        except ChatProblemError as problem:
            self.num_problems += 1
            self.screen.end_answer()
            self.screen.note(str(problem))
        finally:
            self.screen.end_answer()
            if answer:
                self.conversation.add(question, answer)


def main(arguments: Sequence[str], api_key: str | None) -> int:
    """Run the command; return the exit status. `api_key` is the environment's."""
    parser = build_parser(api_key)
    args = parser.parse_args(arguments)
    try:
        server = ChatServer(args.url, args.api_key)
    except ValueError as problem:
        parser.error(f"argument --url: {problem}, got {args.url!r}")
    screen = Screen()
    try:
        return _talk(server, args.model, args.system, screen)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read it has left: end without a word
        return ExitCode.FAILURE


def _talk(server: ChatServer, model: str | None, system: str | None, screen: Screen) -> int:
    try:
        model = model or server.model_names()[0]
    except UnreachableError as problem:
        screen.note(f"error: {problem}; is it running? start one with: octavo serve")
        return ExitCode.FAILURE
    except ChatProblemError as problem:
        screen.note(f"error: {problem}")
        return ExitCode.FAILURE
    if screen.is_terminal:
        screen.note(f"{model} at {server.url}; /help lists commands, Ctrl-D ends")
    chat = Chat(server, model, system, screen)
    chat.run()
    return ExitCode.OK if screen.is_terminal or not chat.num_problems else ExitCode.FAILURE


def build_parser(api_key: str | None) -> Parser:
    """The command line of `octavo chat`."""
    parser = Parser(
        prog="octavo chat",
        description=DESCRIPTION,
        epilog=HELP,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="where the server listens (default: %(default)s)")
    parser.add_argument("--model", help="a name of its model (default: the first that it lists)")
    parser.add_argument("--system", metavar="TEXT", help="what the system says before the conversation")
    add_api_key_flag(parser, api_key)
    return parser
