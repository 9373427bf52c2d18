"""Beam search in request bodies: which fields go with it and what they become for the engine core.

The fields mean what they mean in transformers' `generate`: `best_of` is the number of beams, `n` of them are answered.
Invariant: a field that would have no effect is refused by name, with beams and without. Rejected: streams, because
until the end every beam may still be replaced; and stop strings, because beams are ranked where there is no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.api_server.errors import ApiError, ErrorKind, invalid_value, unsupported
from octavo.api_server.openai.schemas import GenerationRequest
from octavo.protocol.engine_messages import MAX_NUM_BEAMS, BeamSearchParams, EarlyStopping

EARLY_STOPPING = {True: EarlyStopping.ALWAYS, False: EarlyStopping.HEURISTIC, "never": EarlyStopping.NEVER}
SAMPLING_NO_OPS: dict[str, tuple[float, ...]] = {  # a beam search scores the model's own distribution
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
}
BEAM_NO_OPS: dict[str, tuple[float | bool, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}


def beam_width(body: GenerationRequest, num_choices: int) -> int:
    """Return how many sequences of one prompt run at a time, where `num_choices` are answered."""
    return num_choices if body.best_of is None else body.best_of


def check_beam_fields(body: GenerationRequest, num_choices: int, max_num_seqs: int) -> None:
    """Raise ApiError that names the first field that does not go with the others."""
    if not body.use_beam_search:
        for name, no_ops in BEAM_NO_OPS.items():
            _check_no_op(body, name, no_ops, "needs use_beam_search")
        _check_no_op(body, "best_of", (num_choices,), "other than n needs use_beam_search")
        return
    if body.stream:
        raise unsupported("stream", "is not possible with use_beam_search: the beams are known only at the end")
    if body.stop:
        raise unsupported("stop", "strings are not supported with use_beam_search; use stop_token_ids")
    for name, no_ops in SAMPLING_NO_OPS.items():
        allowed = " or ".join(f"{value:g}" for value in no_ops)
        _check_no_op(body, name, no_ops, f"must be absent or {allowed} with use_beam_search, which does not sample")
    _check_width(body, num_choices, min(MAX_NUM_BEAMS, max_num_seqs))


def beam_search_params(body: GenerationRequest, num_choices: int) -> BeamSearchParams | None:
    """Return the search that a checked `body` asks for; raise ApiError when a value is out of range."""
    if not body.use_beam_search:
        return None
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    early_stopping = EARLY_STOPPING[body.early_stopping or False]
    try:
        return BeamSearchParams(beam_width(body, num_choices), num_choices, length_penalty, early_stopping)
    except ValueError as problem:  # its text begins with the field's name, by contract
        raise ApiError(ErrorKind.INVALID_VALUE, str(problem), str(problem).split(" ", 1)[0]) from None


def _check_no_op(body: GenerationRequest, name: str, no_ops: Sequence[float | bool], reason: str) -> None:
    value = getattr(body, name)
    if value is not None and value not in no_ops:
        raise unsupported(name, reason)


def _check_width(body: GenerationRequest, num_choices: int, limit: int) -> None:
    width = beam_width(body, num_choices)
    if width < num_choices:
        raise invalid_value("best_of", f"must be at least n, which is {num_choices}, got {width}")
    if width > limit:
        param = "n" if body.best_of is None else "best_of"
        raise invalid_value(param, f"asks for {width} beams, and this server searches with at most {limit}")
