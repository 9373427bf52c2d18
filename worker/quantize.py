"""Numbers to blocks of 32: how weights are rounded that a checkpoint does not hold in blocks already.

Q8_0 has a scale for each block, largest |weight| / 127, so an error is at most 1/254 of the block's largest weight.
Q4_1 has a scale and a minimum. Taken from the smallest and largest weight alone they spend their 16 steps on two
outliers; so a few narrower ranges are tried as well, scale and minimum are then fitted to the codes (least squares),
and each block keeps what has the smallest squared error. Codes are chosen for the scale as fp16 holds it, which is what
they will be multiplied with.
"""

from __future__ import annotations

import torch

from octavo.kernels.ops.packed_linear import WEIGHTS_PER_BLOCK, WeightFormat

Q8_MAX = 127
Q4_MAX = 15
CHUNK_NUM_GROUPS = 1 << 12  # what is computed at a time, so that it stays in the caches
RANGES = (1.0, 0.92, 0.84)  # parts of a block's range that the codes of Q4_1 are spread over


def quantize_rows(rows: torch.Tensor, blocks: WeightFormat) -> torch.Tensor:
    """Return uint8 [n, bytes of a row] of numbers [n, num_inputs]; raises ValueError for a format without blocks."""
    rounders = {WeightFormat.Q8_0: _q8_0, WeightFormat.Q4_1: _q4_1}
    if blocks not in rounders:
        raise ValueError(f"weights are not rounded to {blocks}")
    groups = rows.reshape(-1, WEIGHTS_PER_BLOCK).split(CHUNK_NUM_GROUPS)
    return torch.cat([rounders[blocks](chunk.float()) for chunk in groups]).view(len(rows), -1)


def _codes(groups: torch.Tensor, scales: torch.Tensor, lowest: int, highest: int) -> torch.Tensor:
    """Return groups / scales as whole numbers within the bounds; 0 where the scale is 0."""
    return (groups * torch.where(scales == 0, 0.0, 1 / scales)).round_().clamp_(lowest, highest)


def _q8_0(groups: torch.Tensor) -> torch.Tensor:
    scales = (groups.abs().amax(1, keepdim=True) / Q8_MAX).half()
    codes = _codes(groups, scales.float(), -Q8_MAX, Q8_MAX).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=1)


def _fit(columns: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the minimum of each group [32, N] that fit its codes best, both [N]."""
    mean_code, mean = codes.mean(0), columns.mean(0)
    deviation = codes - mean_code
    variance = deviation.square().sum(0)
    scales = torch.where(variance == 0, 0.0, (deviation * columns).sum(0) / variance)
    return scales, mean - scales * mean_code


def _q4_1(groups: torch.Tensor) -> torch.Tensor:
    columns = groups.t().contiguous()  # a group in a column: sums over groups then run along vectors
    lowest, highest = columns.amin(0), columns.amax(0)
    best_error = torch.full_like(lowest, torch.inf)
    best_head, best_codes = torch.zeros(2, len(groups)).half(), torch.zeros_like(columns)
    for part in RANGES:
        width = (highest - lowest) * part
        scales, minimums = width / Q4_MAX, (lowest + highest - width) / 2
        codes = _codes(columns - minimums, scales, 0, Q4_MAX)
        for head in ((scales, minimums), _fit(columns, codes)):
            rounded = torch.stack(head).half()
            scales, minimums = rounded.float()
            codes = _codes(columns - minimums, scales, 0, Q4_MAX)
            error = (codes * scales).add_(minimums).sub_(columns).square_().sum(0)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best_head = torch.where(is_better, rounded, best_head)
            best_codes = torch.where(is_better, codes, best_codes)
    low, high = best_codes.t().to(torch.uint8).contiguous().split(WEIGHTS_PER_BLOCK // 2, dim=1)
    return torch.cat((best_head.t().contiguous().view(torch.uint8), low | (high << 4)), dim=1)
