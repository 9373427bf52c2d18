"""What a beam search on the oracle must return: worked out on lists, without blocks, forks or steps."""

from __future__ import annotations

from collections.abc import Sequence

from oracle import choose_candidates
from oracle_logprobs import context_hashes

from octavo.protocol.engine_messages import BeamSearchParams, EarlyStopping
from octavo.protocol.sampling_params import SamplingParams


def expected_beams(
    prompt: Sequence[int],
    params: SamplingParams,
    beam_search: BeamSearchParams,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> list[tuple[list[int], float]]:
    """Outputs and scores of the best finished beams; `params.num_candidates` is what the engine core sets."""
    num_beams, penalty = beam_search.num_beams, beam_search.length_penalty
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    max_length = min(params.max_tokens, max(1, max_model_len - len(prompt)))
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, max_length + 1):
        everything = []
        for output, total in running:
            *_, context_hash = context_hashes([*prompt, *output])
            found = choose_candidates(context_hash, params, length - 1, vocab_size, eos_token_ids)
            everything += [([*output, t], total + p) for t, p in zip(found.token_ids, found.logprobs, strict=True)]
        everything.sort(key=lambda beam: -beam[1])
        best = everything[: params.num_candidates]
        is_end = [output[-1] in ends or length == max_length for output, _ in best]
        finished += [
            (output, total / length**penalty)
            for (output, total), ends_here in zip(best[:num_beams], is_end, strict=False)
            if ends_here
        ]
        finished = sorted(finished, key=lambda beam: -beam[1])[:num_beams]
        running = [beam for beam, ends_here in zip(best, is_end, strict=True) if not ends_here][:num_beams]
        if not running:
            break
        if len(finished) == num_beams:
            reach = max_length if beam_search.early_stopping is EarlyStopping.NEVER and penalty > 0 else length
            is_hopeless = running[0][1] / reach**penalty <= finished[-1][1]
            if beam_search.early_stopping is EarlyStopping.ALWAYS or is_hopeless:
                break
    return finished[: beam_search.num_choices]
