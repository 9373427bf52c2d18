"""`BeamGroup` against transformers' own beam search, on a model that is a table of random logits."""

import random

import pytest
from scheduler_harness import make_config

from octavo.engine_core.beam_search import BeamGroup
from octavo.engine_core.request import Request, why_malformed
from octavo.protocol.engine_messages import AddRequest, BeamOutput, BeamSearchParams, EarlyStopping, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import Candidates

VOCAB = 37
THEIR_EARLY_STOPPING = {EarlyStopping.ALWAYS: True, EarlyStopping.HEURISTIC: False, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module")
def table_model():
    """The next token's logits depend on the last token and the length."""
    import torch
    from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    torch.set_num_threads(1)

    class TableModel(PreTrainedModel, GenerationMixin):
        config_class = LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            self.anchor = torch.nn.Parameter(torch.zeros(1))

        def fill(self, seed, eos_token_ids, eos_bonus):
            self.table = 2 * torch.randn(3, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
            self.table[:, :, list(eos_token_ids)] += eos_bonus

        def log_probs(self, length, token_id):
            return torch.log_softmax(self.table[length % 3, token_id], dim=-1)

        def forward(self, input_ids=None, attention_mask=None, **_):
            logits = self.table[input_ids.shape[1] % 3, input_ids[:, -1]]
            return CausalLMOutput(logits=logits[:, None, :])

        def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
            return {"input_ids": input_ids}

    return TableModel(LlamaConfig(vocab_size=VOCAB, pad_token_id=0, bos_token_id=None, eos_token_id=None))


def their_search(model, prompt, params, beams, eos_token_ids):
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        num_beams=beams.num_beams,
        num_return_sequences=beams.num_choices,
        length_penalty=beams.length_penalty,
        early_stopping=THEIR_EARLY_STOPPING[beams.early_stopping],
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        do_sample=False,
        use_cache=False,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with torch.no_grad():
        mask = torch.ones(1, len(prompt))
        answer = model.generate(torch.tensor([prompt]), generation_config=config, attention_mask=mask)
    outputs = []
    for sequence in answer.sequences.tolist():
        output = sequence[len(prompt) :]
        ends = [index for index, token_id in enumerate(output) if token_id in eos_token_ids]
        outputs.append(output[: ends[0] + 1] if ends else output)
    return outputs, answer.sequences_scores.tolist()


def our_search(model, prompt, params, beams, eos_token_ids):
    """Drive the group as the scheduler does, without blocks: a beam is a request with its tokens."""
    config = make_config(vocab_size=VOCAB, eos_token_ids=eos_token_ids, max_model_len=500)
    num_candidates = max(2, 1 + len(eos_token_ids)) * beams.num_beams
    params = SamplingParams(
        max_tokens=params.max_tokens, min_tokens=params.min_tokens, temperature=0.0, num_candidates=num_candidates
    )

    def make_beam(number, output):
        command = AddRequest(f"b{number}", prompt, params, 0.0, output)
        return Request(command, (0, 0.0, 1, number), config.model, b"root")

    first = make_beam(0, [])
    group = BeamGroup(beams, first)
    continuations, number = [None], 0
    while continuations:
        number += 1
        for beam in group.running:
            assert not group.has_all_reports()
            group.reports[beam.request_id] = candidates_of(model, beam, eos_token_ids)
        assert group.has_all_reports()
        parents = group.running
        continuations = group.select()
        assert group.reports == {}
        assert continuations == sorted(continuations, key=lambda c: -c.logprob)
        group.advance(
            [
                make_beam(100 * number + index, [*parents[c.parent].output_token_ids, c.token_id])
                for index, c in enumerate(continuations)
            ],
            [c.logprob for c in continuations],
        )
    return group.finished[: beams.num_choices]


def candidates_of(model, beam, eos_token_ids):
    import torch

    tokens = [*beam.prompt_token_ids, *beam.output_token_ids]
    log_probs = model.log_probs(len(tokens), tokens[-1]).clone()
    if beam.num_output_tokens < beam.sampling_params.min_tokens:
        log_probs[list(eos_token_ids)] = -torch.inf
    values, indices = torch.topk(log_probs, min(VOCAB, beam.sampling_params.num_candidates))
    pairs = [pair for pair in zip(indices.tolist(), values.tolist(), strict=True) if pair[1] > -torch.inf]
    return Candidates([token_id for token_id, _ in pairs], [logprob for _, logprob in pairs])


CASES = [
    (early_stopping, length_penalty, eos_token_ids)
    for early_stopping in EarlyStopping
    for length_penalty in (0.0, 0.5, 1.0, 2.0, -1.0)
    for eos_token_ids in ((), (2,), (2, 5, 11))
]


@pytest.mark.parametrize(("early_stopping", "length_penalty", "eos_token_ids"), CASES)
def test_the_beams_are_those_of_transformers(table_model, early_stopping, length_penalty, eos_token_ids):
    for seed in range(4):
        numbers = random.Random(seed)
        table_model.fill(seed, eos_token_ids, eos_bonus=numbers.choice([0.0, 1.0, 3.0]))
        prompt = [numbers.randrange(VOCAB) for _ in range(numbers.choice([1, 2, 9]))]
        max_tokens = numbers.choice([1, 2, 5, 12])
        min_tokens = numbers.choice([0, 0, 1, max_tokens]) if eos_token_ids else 0
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
        num_beams = numbers.choice([2, 3, 4, 6])
        beams = BeamSearchParams(num_beams, numbers.randint(1, num_beams), length_penalty, early_stopping)
        theirs, their_scores = their_search(table_model, prompt, params, beams, eos_token_ids)
        ours = our_search(table_model, prompt, params, beams, eos_token_ids)
        assert [beam.token_ids for beam in ours] == theirs, f"seed {seed}"
        assert [beam.score for beam in ours] == pytest.approx(their_scores, rel=1e-4, abs=1e-5)
        for beam in ours:
            is_stop = beam.token_ids[-1] in eos_token_ids
            assert beam.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            assert beam.stop_token_id == (beam.token_ids[-1] if is_stop else None)


def test_one_beam_is_greedy(table_model):
    table_model.fill(1, (2,), eos_bonus=0.0)
    (beam,) = our_search(table_model, [1], SamplingParams(max_tokens=9), BeamSearchParams(1, 1), (2,))
    tokens = [1]
    while len(tokens) < 10 and (len(tokens) == 1 or tokens[-1] != 2):
        tokens.append(int(table_model.log_probs(len(tokens), tokens[-1]).argmax()))
    assert beam.token_ids == tokens[1:]


def make_group(num_beams=2, num_running=2, max_tokens=9, **params):
    config = make_config(eos_token_ids=(2,), max_model_len=50)
    sampling_params = SamplingParams(max_tokens=max_tokens, num_candidates=4)
    beams = [
        Request(AddRequest(f"b{number}", [1], sampling_params, 0.0), (0, 0.0, 1, number), config.model, b"root")
        for number in range(num_running)
    ]
    group = BeamGroup(BeamSearchParams(num_beams, num_beams, **params), beams[0])
    group.advance(beams, [0.0] * num_running)
    return group, beams


def test_a_search_follows_no_grammar():
    params = SamplingParams(max_tokens=3, grammar='start: "a"')
    search = AddRequest("a", [5], params, 0.0, beam_search=BeamSearchParams(2, 2))
    assert why_malformed(AddRequest("a", [5], params, 0.0), 10) is None
    assert why_malformed(search, 10) == "a beam search follows no grammar"


def test_equal_scores_keep_the_order_of_beam_and_token():
    group, _ = make_group()
    group.reports = {"b0": Candidates([9, 4], [-1.0, -1.0]), "b1": Candidates([3, 7], [-1.0, -1.0])}
    assert [(c.parent, c.token_id) for c in group.select()] == [(0, 4), (0, 9)]


def test_a_beam_that_starts_over_has_to_report_again():
    group, beams = make_group()
    group.reports = {"b0": Candidates([4], [-1.0]), "b1": Candidates([3], [-1.0])}
    fresh = beams[1].start_over()
    group.replace(beams[1], fresh)
    assert not group.has_all_reports()
    assert group.running == [beams[0], fresh]
    group.reports["b1"] = Candidates([3], [-2.0])
    assert [(c.parent, c.token_id) for c in group.select()] == [(0, 4), (1, 3)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "goes_on"),
    [
        (EarlyStopping.ALWAYS, 1.0, False),
        (EarlyStopping.HEURISTIC, 1.0, False),  # -1.7 / 1 cannot beat -1
        (EarlyStopping.NEVER, 1.0, True),  # -1.7 / 2 can, at the length to come
        (EarlyStopping.NEVER, 0.5, False),  # -1.7 / sqrt(2) cannot
        (EarlyStopping.NEVER, 0.0, False),
        (EarlyStopping.NEVER, -1.0, False),
    ],
)
def test_a_search_goes_on_as_long_as_it_may_find_something_better(early_stopping, length_penalty, goes_on):
    """A prompt of one token and two of output at most: both beams end at once, the best that goes on is behind them."""
    group, _ = make_group(max_tokens=2, early_stopping=early_stopping, length_penalty=length_penalty)
    group.reports = {"b0": Candidates([2, 9], [-0.9, -1.7]), "b1": Candidates([2, 8], [-1.0, -1.9])}
    assert bool(group.select()) is goes_on
    assert [beam.score for beam in group.finished] == [-0.9, -1.0]


def test_without_reward_for_length_only_the_present_one_counts():
    """-0.4 at this length beats -0.9; -0.4 * 3, at the last one, would not."""
    group, _ = make_group(max_tokens=3, early_stopping=EarlyStopping.NEVER, length_penalty=-1.0)
    group.finished = [BeamOutput([2], -0.9, FinishReason.STOP, 2)] * 2
    group.reports = {"b0": Candidates([9], [-0.4]), "b1": Candidates([8], [-5.0])}
    assert group.select()
