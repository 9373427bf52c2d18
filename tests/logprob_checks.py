"""Logprobs of the same tokens from two places that add in different orders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.protocol.engine_messages import RequestOutput
from octavo.protocol.logprobs import TokenLogprobs


def rows_of(output: RequestOutput) -> list[TokenLogprobs | None]:
    """Return those of the output and those of the prompt."""
    return [output.logprobs, None if output.prompt_logprobs is None else output.prompt_logprobs.rows]


def check_close(outputs: Sequence[RequestOutput], others: Sequence[RequestOutput], tolerance: float = 1e-4) -> None:
    """Fail when the two differ by more than rounding: in who has logprobs, of how many tokens, and in values."""
    for output, other in zip(outputs, others, strict=True):
        for ours, theirs in zip(rows_of(output), rows_of(other), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert (ours.num_rows, ours.num_listed) == (theirs.num_rows, theirs.num_listed)
                values, other_values = (np.frombuffer(rows.logprobs, "<f4") for rows in (ours, theirs))
                np.testing.assert_allclose(values, other_values, atol=tolerance)
                own_ids, other_own_ids = (
                    np.frombuffer(rows.token_ids, "<i4")[:: 1 + ours.num_listed] for rows in (ours, theirs)
                )
                assert own_ids.tolist() == other_own_ids.tolist()
