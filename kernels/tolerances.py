"""How far an implementation of an op may be from a float64 computation on the same inputs, by dtype.

Inputs are of the size of activations, about 1. Every op computes in fp32 at least and rounds its result once or twice,
so that the errors are those of fp32 sums and of rounding to the dtype; a kernel that needs more has a defect.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Largest |got - expected| is absolute + relative · |expected|."""

    absolute: float
    relative: float


TOLERANCES = {
    # 24 bits: relative 2^-24 per rounding; sums of some thousand terms of size 1 that cancel lose up to 1e-5 in all.
    torch.float32: Tolerance(absolute=2e-5, relative=1e-5),
    # 11 bits: 2^-11 per rounding, two roundings and one for sums in parts; absolute for what is left of a cancellation.
    torch.float16: Tolerance(absolute=2**-9, relative=2**-9),
    # 8 bits: 2^-8 per rounding to nearest at worst, and the same reasons.
    torch.bfloat16: Tolerance(absolute=2**-6, relative=2**-6),
}
