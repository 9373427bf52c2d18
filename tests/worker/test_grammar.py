"""What may follow in a grammar: against llguidance's own check of each token, and against text."""

from __future__ import annotations

import json
import operator
import random

import grammar_cases
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from octavo.protocol.grammar_limits import LLGUIDANCE_LIMITS
from octavo.worker import grammar
from octavo.worker.grammar import NO_GRAMMARS, Grammars, GrammarState
from octavo.worker.token_masks import unpack_bits

VOCAB_SIZE = grammar_cases.VOCAB_SIZE
RAW = grammar_cases.tokenizer()
EOS, START = RAW.token_to_id("</s>"), RAW.token_to_id("<|turn|>")
TEXTS = {
    **{name: grammar_cases.of_schema(schema) for name, schema in grammar_cases.SCHEMAS.items()},
    "regex": "start: /(ab|ac)+x{2,5}[0-9é日]*/",
    "choice": 'start: "stop" | "stopped" | "hello"',
    "special": 'start: <|turn|> "hello"',
}
LARGE = r"start: /[a-z]{3,40}(foo|bar|baz)[0-9]{2,80}(x|y)*[a-f]{100}/"  # its lexer has some 300 states


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    RAW.enable_truncation(5)  # which says nothing about what may follow
    RAW.enable_padding(direction="left", length=60)
    RAW.save(str(path))
    RAW.no_truncation()
    RAW.no_padding()
    return path


@pytest.fixture(scope="module")
def grammars(path):
    return Grammars(path, VOCAB_SIZE, (EOS, VOCAB_SIZE + 5))


def allowed(state):
    bits = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    state.fill(bits)
    return unpack_bits(bits)


def random_walk(grammars, text, seed, max_tokens=40):
    """Yield each prefix of a random output and what may follow it."""
    state, output, draw = GrammarState(grammars, text), [], random.Random(seed)
    while EOS not in output and len(output) < max_tokens:
        ids = allowed(state)
        yield list(output), ids
        output.append(draw.choice(ids))
        state.accept(output[-1:])
    yield output, []


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("seed", range(4))
def test_what_may_follow_is_what_is_accepted(grammars, name, seed):
    """Each token by itself, tried by a matcher that never made a mask; a forced one is among those and stands alone."""
    for prefix, ids in random_walk(grammars, TEXTS[name], seed):
        judge = grammars.compile(TEXTS[name])
        assert judge.consume_tokens(prefix)
        accepted = [i for i in range(VOCAB_SIZE) if (judge.is_accepting() if i == EOS else judge.validate_tokens([i]))]
        forced = judge.compute_ff_tokens()
        assert EOS not in forced
        if prefix[-1:] != [EOS] and ids:
            assert ids == (forced[:1] or accepted)
            assert set(ids) <= set(accepted)


def test_text_is_the_oracle_of_a_choice(grammars):
    words = ["stop", "stopped", "hello"]
    pieces = {i: RAW.decode([i]) for i in range(3, RAW.get_vocab_size())}
    for prefix, ids in random_walk(grammars, TEXTS["choice"], 1):
        said = "".join(pieces.get(i, "") for i in prefix)
        possible = {i for i, piece in pieces.items() if any(word.startswith(said + piece) for word in words)}
        assert set(ids) - {EOS} <= possible
        assert (EOS in ids) == (said in words and EOS not in prefix) or prefix[-1:] == [EOS]


@pytest.mark.parametrize("name", grammar_cases.SCHEMAS)
def test_outputs_are_documents(grammars, name):
    outputs = [list(random_walk(grammars, TEXTS[name], seed, 200))[-1][0] for seed in range(10)]
    documents = [json.loads(RAW.decode(output[:-1])) for output in outputs if output[-1] == EOS]
    assert len(documents) >= 5
    for document in documents:
        assert isinstance(document, dict | list)


def test_where_one_text_is_left_its_usual_tokens_follow(grammars):
    """It could be spelt in many ways: each letter has a token."""
    text = "hello words and the stopping of stopped words"
    state, output = GrammarState(grammars, f'start: "{text}"'), []
    while EOS not in output:
        (token_id,) = allowed(state)
        output.append(token_id)
        state.accept([token_id])
    assert output == [*RAW.encode(text).ids, EOS]
    assert len(output) < len(text)


def test_what_was_said_at_once_or_one_by_one_is_the_same(grammars):
    for prefix, ids in random_walk(grammars, TEXTS["person"], 5):
        state = GrammarState(grammars, TEXTS["person"])
        state.accept(prefix)
        assert state.num_tokens == len(prefix)
        if ids:
            assert allowed(state) == ids


def test_after_the_end_only_the_end_may_follow(grammars):
    state = GrammarState(grammars, 'start: "a"')
    state.accept([RAW.token_to_id("a")])
    assert allowed(state) == [EOS]
    for _ in range(3):
        state.accept([EOS])
        assert allowed(state) == [EOS]
    assert state.failed_at == -1


def test_before_its_start_token_all_but_the_end_may_come(grammars):
    state = GrammarState(grammars, TEXTS["choice"], (START, 7))
    everything = [i for i in range(VOCAB_SIZE) if i != EOS]
    assert allowed(state) == everything
    state.accept([50, 51])
    assert allowed(state) == everything
    state.accept([52, START, *RAW.encode("hell").ids])
    assert allowed(state) == [RAW.token_to_id("o")]
    again = GrammarState(grammars, TEXTS["choice"], (START, 7))
    again.accept([7, *RAW.encode("stop").ids])
    assert EOS in allowed(again)


@pytest.mark.parametrize("text", ["start: a", '{"grammars": [{"json_schema": {"type": "nope"}}]}', "start: /(/"])
def test_a_bad_grammar_is_a_problem_of_its_request(grammars, text):
    state, other = GrammarState(grammars, text), GrammarState(grammars, TEXTS["choice"])
    assert allowed(state) == []
    assert (state.failed_at, bool(state.problem)) == (0, True)
    assert allowed(state) == []
    assert allowed(other)


def test_a_token_that_cannot_follow_is_a_problem(grammars):
    state = GrammarState(grammars, TEXTS["choice"])
    state.accept([RAW.token_to_id("x")])
    assert allowed(state) == []
    assert state.failed_at == 1


def test_without_a_tokenizer_grammars_fail(tmp_path):
    for grammars in (NO_GRAMMARS, Grammars(tmp_path / "none.json", VOCAB_SIZE, (EOS,))):
        state = GrammarState(grammars, TEXTS["choice"], ())
        assert allowed(state) == []
        assert state.problem


def fails_at(grammars, seed, is_alone=False):
    """After how many tokens a request fails; each seed says something else."""
    state, draw = GrammarState(grammars, LARGE), random.Random(seed)
    state._is_alone = is_alone  # it has a matcher of its own, and no second try
    while ids := allowed(state):
        state.accept([draw.choice(ids)])
    return state.failed_at


def test_who_fails_takes_nobody_along(path, monkeypatch):
    """Copies of a grammar share the states of its lexer, of which there may be so many, but not the failure."""
    monkeypatch.setitem(grammar.LLGUIDANCE_LIMITS, "max_lexer_states", 150)
    alone = [fails_at(Grammars(path, VOCAB_SIZE, (EOS,)), seed, is_alone=True) for seed in range(4)]
    assert min(alone) > 10
    shared = Grammars(path, VOCAB_SIZE, (EOS,))
    together = [fails_at(shared, seed) for seed in range(4)]
    assert all(map(operator.ge, together, alone))
    compiled, compile_text = [], shared.compile
    monkeypatch.setattr(shared, "compile", lambda text: compiled.append(text) or compile_text(text))
    assert all(allowed(GrammarState(shared, LARGE)) for _ in range(3))
    assert compiled == [LARGE], "who comes later begins with states that nobody used up"
    spent, words = shared.copy(LARGE), np.zeros((1, 11), np.int32)
    while not spent.is_error():  # somebody who is still there
        fill_next_token_bitmask(spent, words)
        spent.consume_token(unpack_bits(words)[0])
    assert all(map(operator.ge, [fails_at(shared, seed) for seed in range(4)], alone))


class PanickingError(BaseException):
    """As pyo3's PanicException."""


def test_a_panic_is_a_problem_of_its_request(grammars, monkeypatch):
    def panic(text):
        raise PanickingError

    state = GrammarState(grammars, TEXTS["choice"])
    monkeypatch.setattr(grammars, "copy", panic)
    assert allowed(state), "a copy failed, and a matcher of its own does not"
    state = GrammarState(grammars, TEXTS["choice"])
    monkeypatch.setattr(grammars, "compile", panic)
    assert allowed(state) == []
    assert state.problem == "PanickingError"


def test_a_grammar_is_compiled_once_and_few_are_kept(path, monkeypatch):
    grammars = Grammars(path, VOCAB_SIZE, (EOS,))
    compiled, compile_text = [], grammars.compile
    monkeypatch.setattr(grammars, "compile", lambda text: compiled.append(text) or compile_text(text))
    monkeypatch.setattr(grammar, "MAX_NUM_COMPILED", 2)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert allowed(GrammarState(grammars, f'start: "{name}"'))
    assert [text[-2] for text in compiled] == ["a", "b", "c", "b"]


def test_the_limits_are_llguidances(grammars):
    """An option that a later version does not know would be an error for every grammar."""
    assert LLGUIDANCE_LIMITS
    assert isinstance(grammars.compile(TEXTS["choice"]), LLMatcher)
