"""Which weights are held in blocks, and in which: decided from what the checkpoint's headers say.

Blocks that a checkpoint has and kernels know are used as they are, never widened and rounded again. The parts of one
weight (query, key and value) are multiplied by one kernel, so parts in different formats are all widened. The output
head decides between tokens and the embedding is read by every one, so neither goes below 8 bits; what else the choice
rests on is the table of formats in `tests/bench/README.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from octavo.kernels.ops.packed_linear import WeightFormat
from octavo.protocol.config import Dtype, ModelConfig, Quantization
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.device import MIB
from octavo.worker.layers.linear_weight import BlockFormatOf, HeldPacked
from octavo.worker.stored_tensor import StoredTensor

ROUNDED_TO = {Quantization.INT8: WeightFormat.Q8_0, Quantization.INT4: WeightFormat.Q4_1}
VOCABULARY = {"model.embed_tokens.weight", "lm_head.weight"}


def check_quantization(quantization: Quantization, packs_weights: bool) -> None:
    """Raise StartupError(USAGE) when weights are to be rounded to blocks and nothing here multiplies blocks."""
    if quantization in ROUNDED_TO and not packs_weights:
        raise StartupError(
            ExitCode.USAGE,
            f"--quantization {quantization}: needs the compiled kernels of CPUs, which are not in use here (a GPU "
            "computes, or octavo was installed without a C++ compiler); use --quantization auto",
        )


def choose_formats(model: ModelConfig, tensors: Mapping[str, StoredTensor]) -> BlockFormatOf:
    """Return the choice for packed weights; the device must multiply blocks.

    A user who asks for float32 wants its precision, so that `auto` then leaves nothing in blocks.
    """
    is_dense = model.quantization is Quantization.NONE or (
        model.quantization is Quantization.AUTO and model.dtype is Dtype.FLOAT32
    )

    def format_of(name: str) -> WeightFormat | None:
        stored = tensors.get(name)
        if stored is None or stored.blocks is not None:
            return None if stored is None else stored.blocks
        wanted = ROUNDED_TO.get(model.quantization)
        return WeightFormat.Q8_0 if wanted is not None and name in VOCABULARY else wanted

    def block_format_of(names: Sequence[str]) -> WeightFormat | None:
        formats = {format_of(name) for name in names}
        return formats.pop() if len(formats) == 1 and not is_dense else None

    return block_format_of


def describe_formats(model: nn.Module) -> str:
    """Say in which formats the packed weights of a model are, empty when none is packed."""
    num_bytes: Counter[WeightFormat] = Counter()
    for module in model.modules():
        if isinstance(module, HeldPacked):
            num_bytes[module.packed.format] += module.data.nbytes
    return ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in num_bytes.most_common())


def describe_widening(tensors: Mapping[str, StoredTensor]) -> str:
    """Say in which blocks a checkpoint is that had to be widened, empty when it has none."""
    kept = Counter(stored.blocks for stored in tensors.values() if stored.blocks is not None)
    return ", ".join(f"{blocks}" for blocks, _ in kept.most_common())
