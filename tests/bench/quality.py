"""What formats of weights and KV cost in quality: `python tests/bench/quality.py --threads 2`.

Perplexity over 2,048 tokens of two English texts (teacher-forced, in chunks of 512, over the paged cache),
how often the likeliest token is that of fp32, and how many tokens of a greedy continuation stay the same: each prompt's
fp32 continuation is teacher-forced as well, and up to the first other choice that is what generation would have seen.
The model runs in this process, on the kernels that a worker would take, with the loader's own rounding.

The embedded model is in blocks of 4 bits, so rounding it to 4 bits again finds the same blocks. What int8 and int4
cost a checkpoint of 16 bits is what the rows "shifted" show: there the groups of 32 begin in the middle of the file's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from embedded_model import embedded_model_config, locate_embedded_model
from tokenizers import Tokenizer

from octavo.api_server.client.workloads import ENGLISH
from octavo.kernels.ops.attention import plan_attention
from octavo.kernels.ops.packed_linear import WeightFormat, dequantize_rows
from octavo.protocol.config import CacheConfig, Dtype, KvCacheDtype, ModelConfig, Quantization, SchedulerConfig
from octavo.worker import weight_loader
from octavo.worker.cpu_device import CpuDevice
from octavo.worker.kv_cache import kv_cache_shape, select_kv_dtype
from octavo.worker.layers.attention import AttentionMetadata
from octavo.worker.models.config import LlamaConfig, read_config
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.quantize import quantize_rows
from octavo.worker.stored_tensor import StoredTensor
from octavo.worker.weight_formats import describe_formats

TEXTS = (ENGLISH, Path(__file__).with_name("prose.txt"))
NUM_TOKENS, CHUNK, BLOCK_SIZE = 2048, 512, 16
NUM_PROMPTS, PROMPT_LENGTH, NUM_GREEDY = 16, 48, 48
SHIFT = 16  # half a block


class Variant(NamedTuple):
    """One row of the table.

    Attributes:
        widens: read the checkpoint as numbers, as if it were not in blocks.
        rounded_to: round these numbers to such blocks that are not the file's, and hold the result as numbers.
    """

    name: str
    dtype: Dtype | None
    quantization: Quantization
    kv: KvCacheDtype = KvCacheDtype.AUTO
    widens: bool = False
    rounded_to: WeightFormat | None = None


VARIANTS = (
    Variant("fp32", Dtype.FLOAT32, Quantization.NONE),
    Variant("bf16", Dtype.BFLOAT16, Quantization.NONE),
    Variant("Q4_1 as in the file", Dtype.BFLOAT16, Quantization.AUTO),
    Variant("int8", Dtype.BFLOAT16, Quantization.INT8, widens=True),
    Variant("int4", Dtype.BFLOAT16, Quantization.INT4, widens=True),
    Variant("int8 shifted, bf16 activations", Dtype.BFLOAT16, Quantization.NONE, rounded_to=WeightFormat.Q8_0),
    Variant("int4 shifted, bf16 activations", Dtype.BFLOAT16, Quantization.NONE, rounded_to=WeightFormat.Q4_1),
    Variant("bf16, KV fp8", Dtype.BFLOAT16, Quantization.NONE, KvCacheDtype.FP8),
    Variant("bf16, KV int8", Dtype.BFLOAT16, Quantization.NONE, KvCacheDtype.INT8),
    Variant("Q4_1 as in the file, KV fp8", Dtype.BFLOAT16, Quantization.AUTO, KvCacheDtype.FP8),
    Variant("Q4_1 as in the file, KV int8", Dtype.BFLOAT16, Quantization.AUTO, KvCacheDtype.INT8),
)


def widened(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The checkpoint as if it were not in blocks."""
    return {name: stored._replace(blocks=None, read_blocks=None) for name, stored in tensors.items()}


def rounded(stored: StoredTensor, blocks: WeightFormat) -> StoredTensor:
    """Read a matrix rounded to groups that begin in the middle of the file's."""
    if len(stored.shape) != 2:
        return stored
    is_vocabulary = "layers" not in stored.name
    used = WeightFormat.Q8_0 if is_vocabulary else blocks

    def read(rows: range | None = None) -> torch.Tensor:
        numbers = stored.read(rows).float().roll(SHIFT, dims=1)
        return dequantize_rows(quantize_rows(numbers, used), used).roll(-SHIFT, dims=1)

    return stored._replace(read=read)


class Loader:
    """Loads the embedded model in any of the formats."""

    def __init__(self, device: CpuDevice) -> None:
        location = locate_embedded_model()
        self.device = device
        self.directory, self.gguf = location.path, location.weights_path
        self.config: LlamaConfig = read_config(str(self.directory))

    def load(self, variant: Variant) -> LlamaForCausalLM:
        base = embedded_model_config(
            self.directory, self.gguf, CacheConfig(), SchedulerConfig(), max_model_len=NUM_TOKENS, dtype=variant.dtype
        ).model
        model_config = ModelConfig(
            **{field: getattr(base, field) for field in base.__struct_fields__ if field != "quantization"},
            quantization=variant.quantization,
        )
        dtype, _ = self.device.select_dtype(variant.dtype, None)
        open_checkpoint = weight_loader.open_checkpoint

        def opened(*args: object) -> dict[str, StoredTensor]:
            tensors = open_checkpoint(*args)
            if variant.widens or variant.rounded_to is not None:
                tensors = widened(tensors)
            if variant.rounded_to is not None:
                tensors = {name: rounded(stored, variant.rounded_to) for name, stored in tensors.items()}
            return tensors

        with mock.patch.object(weight_loader, "open_checkpoint", opened):
            return weight_loader.load_model(
                *(model_config, self.config, dtype, self.device.torch_device), packs_weights=self.device.packs_weights
            )


class Run:
    """Some requests over a KV cache of their own, all with as many tokens."""

    def __init__(self, model: LlamaForCausalLM, kv_dtype: torch.dtype, num_requests: int, max_tokens: int) -> None:
        self.model = model
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        shape = kv_cache_shape(model.kv_shape, num_requests * num_blocks, BLOCK_SIZE, kv_dtype)
        self.kv_cache = torch.zeros(shape, dtype=torch.uint8 if kv_dtype.itemsize == 1 else kv_dtype).view(kv_dtype)
        self.block_tables = torch.arange(num_requests * num_blocks, dtype=torch.int32).view(num_requests, -1)
        self.num_computed = 0

    @torch.inference_mode()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute int64 [num_requests, n] behind what there is; return fp32 [num_requests, n, vocab_size]."""
        num_requests, num_tokens = token_ids.shape
        positions = torch.arange(self.num_computed, self.num_computed + num_tokens)
        self.num_computed += num_tokens
        blocks = self.block_tables[:, positions // BLOCK_SIZE].long()
        seq_lens = torch.full((num_requests,), self.num_computed, dtype=torch.int32)
        query_start_loc = torch.arange(num_requests + 1, dtype=torch.int32) * num_tokens
        plan = plan_attention(query_start_loc.diff().numpy(), seq_lens.numpy(), self.model.heads)
        slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
        metadata = AttentionMetadata(query_start_loc, seq_lens, self.block_tables, slots, plan)
        hidden = self.model(token_ids.flatten(), positions.repeat(num_requests), self.kv_cache, metadata)
        return self.model.compute_logits(hidden).clone().view(num_requests, num_tokens, -1)


class Score(NamedTuple):
    """What was measured of one variant.

    Attributes:
        choices: int64 [NUM_TOKENS], the likeliest token at each place of the text.
        greedy: int64 [NUM_PROMPTS, NUM_GREEDY], the likeliest tokens after the prompts and fp32's continuations.
    """

    perplexity: float
    choices: torch.Tensor
    greedy: torch.Tensor


def score(model: LlamaForCausalLM, kv_dtype: torch.dtype, text: torch.Tensor, followed: torch.Tensor) -> Score:
    """Measure; `followed` are the prompts with their continuations."""
    run, losses, choices = Run(model, kv_dtype, 1, NUM_TOKENS), [], []
    for first in range(0, NUM_TOKENS, CHUNK):
        logits = run.logits(text[None, first : first + CHUNK])[0]
        targets = text[first + 1 : first + CHUNK + 1]
        losses.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
        choices.append(logits.argmax(-1))
    perplexity = torch.cat(losses).double().mean().exp().item()
    run = Run(model, kv_dtype, *followed.shape)
    greedy = run.logits(followed[:, :-1])[:, PROMPT_LENGTH - 1 :].argmax(-1)
    return Score(perplexity, torch.cat(choices), greedy)


def continue_greedily(model: LlamaForCausalLM, kv_dtype: torch.dtype, prompts: torch.Tensor) -> torch.Tensor:
    """Return the prompts with NUM_GREEDY tokens behind each."""
    run, followed = Run(model, kv_dtype, len(prompts), PROMPT_LENGTH + NUM_GREEDY), prompts
    logits = run.logits(prompts)
    for _ in range(NUM_GREEDY):
        chosen = logits[:, -1:].argmax(-1)
        followed = torch.cat((followed, chosen), dim=1)
        logits = run.logits(chosen)
    return followed


def read_tokens(loader: Loader) -> torch.Tensor:
    """Return the text, int64 [NUM_TOKENS]."""
    tokenizer = Tokenizer.from_file(str(loader.directory / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(path.read_text() for path in TEXTS)).ids
    if len(ids) < NUM_TOKENS:
        raise SystemExit(f"the text has {len(ids)} tokens only")
    return torch.tensor(ids[:NUM_TOKENS])


def rows(loader: Loader, text: torch.Tensor, variants: Sequence[Variant]) -> Iterator[str]:
    """Yield the lines of the table; the first variant is what the others are compared with."""
    starts = torch.linspace(0, NUM_TOKENS - PROMPT_LENGTH, NUM_PROMPTS).long()
    prompts = torch.stack([text[start : start + PROMPT_LENGTH] for start in starts])
    followed, scores = torch.empty(0), {}
    for variant in variants:
        started_s = time.monotonic()
        model = loader.load(variant)
        dtype = model.norm.weight.dtype
        kv_dtype = select_kv_dtype(variant.kv, dtype, has_8_bit_kv=True)
        if not scores:
            followed = continue_greedily(model, kv_dtype, prompts)
        found = scores[variant.name] = score(model, kv_dtype, text, followed)
        reference = scores[variants[0].name]
        bf16 = scores.get("bf16", reference)
        same = (found.greedy == followed[:, PROMPT_LENGTH:]).long().cumprod(1).sum(1)
        agreement = (found.choices == reference.choices).float().mean().item()
        yield (
            f"| {variant.name} | {found.perplexity:.3f} | {found.perplexity / reference.perplexity - 1:+.2%} | "
            f"{found.perplexity / bf16.perplexity - 1:+.2%} | {agreement:.1%} | {same.float().mean().item():.1f} | "
            f"{int((same == NUM_GREEDY).sum())} | {describe_formats(model) or 'plain'} | "
            f"{time.monotonic() - started_s:.0f} s |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", help="part of the names of the rows besides fp32 and bf16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = CpuDevice(num_threads=arguments.threads)
    device.select_kernels(is_deterministic=False)
    loader = Loader(device)
    text = read_tokens(loader)
    wanted = [each for each in VARIANTS[2:] if not arguments.only or any(part in each.name for part in arguments.only)]
    columns = (
        "format",
        "perplexity",
        "vs fp32",
        "vs bf16",
        "top 1",
        f"of {NUM_GREEDY} greedy",
        f"of {NUM_PROMPTS} all",
    )
    print(f"| {' | '.join((*columns, 'weights', 'took'))} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows(loader, text, [*VARIANTS[:2], *wanted]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
