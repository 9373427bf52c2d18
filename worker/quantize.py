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
RANGES = (1.0, 0.92, 0.84)  # parts of a block's range that the codes of Q4_1 are spread over


def quantize_rows(rows: torch.Tensor, blocks: WeightFormat) -> torch.Tensor:
    """Return uint8 [n, bytes of a row] of numbers [n, num_inputs]; raises ValueError for a format without blocks."""
    groups = rows.float().reshape(-1, WEIGHTS_PER_BLOCK)
    if blocks is WeightFormat.Q8_0:
        return _q8_0(groups).view(len(rows), -1)
    if blocks is WeightFormat.Q4_1:
        return _q4_1(groups).view(len(rows), -1)
    raise ValueError(f"weights are not rounded to {blocks}")


def _codes(groups: torch.Tensor, scales: torch.Tensor, highest: int) -> torch.Tensor:
    """Return groups / scales as whole numbers up to `highest`; zeros where the scale is 0."""
    codes = (groups / scales).round_().clamp_(max=highest)
    return torch.where(scales == 0, 0.0, codes)


def _q8_0(groups: torch.Tensor) -> torch.Tensor:
    scales = (groups.abs().amax(1, keepdim=True) / Q8_MAX).half()
    codes = _codes(groups, scales.float(), Q8_MAX).clamp_(min=-Q8_MAX).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=1)


def _fit(groups: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the minimum of each group that fit its codes best, both [N, 1]."""
    mean_code, mean = codes.mean(1, keepdim=True), groups.mean(1, keepdim=True)
    deviation = codes - mean_code
    variance = deviation.square().sum(1, keepdim=True)
    scales = (deviation * groups).sum(1, keepdim=True) / variance
    scales = torch.where(variance == 0, 0.0, scales)
    return scales, mean - scales * mean_code


def _q4_1(groups: torch.Tensor) -> torch.Tensor:
    lowest, highest = groups.aminmax(dim=1, keepdim=True)
    best_error = torch.full_like(lowest, torch.inf)
    best_head, best_codes = torch.zeros(len(groups), 2).half(), torch.zeros_like(groups)
    for part in RANGES:
        width = (highest - lowest) * part
        scales, minimums = width / Q4_MAX, (lowest + highest - width) / 2
        codes = _codes(groups - minimums, scales, Q4_MAX).clamp_(min=0)
        for head in ((scales, minimums), _fit(groups, codes)):
            rounded = torch.cat(head, dim=1).half()
            scales, minimums = rounded.float().split(1, dim=1)
            codes = _codes(groups - minimums, scales, Q4_MAX).clamp_(min=0)
            error = (codes * scales + minimums - groups).square_().sum(1, keepdim=True)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best_head = torch.where(is_better, rounded, best_head)
            best_codes = torch.where(is_better, codes, best_codes)
    low, high = best_codes.to(torch.uint8).split(WEIGHTS_PER_BLOCK // 2, dim=1)
    return torch.cat((best_head.view(torch.uint8), low | (high << 4)), dim=1)
