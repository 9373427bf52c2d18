"""How much KV memory choices and beams share: distinct ÷ logical blocks on the embedded model.

    PYTHONPATH=tests python tests/bench/sharing.py [--prompt 160] [--output 64] [--prompts 4] [--block-size 16]

Logical blocks are what the block tables of all choices or beams of a prompt name, distinct ones what they occupy; both
are summed over all steps. Prompts are pieces of `ENGLISH`, each run alone. Kwon et al. (SOSP 2023, fig. 15) report
6 to 10 % saved by parallel sampling and 38 to 55 % by beam search on Alpaca, 16 to 31 % and 44 to 66 % on ShareGPT.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from embedded_model import embedded_model_config, locate_embedded_model
from inline_engine import InlineEngine

from octavo.api_server.client.workloads import ENGLISH
from octavo.api_server.model_source import Location
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import CacheConfig, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams
from octavo.protocol.sampling_params import SamplingParams


def make_engine(model: Location, block_size: int) -> InlineEngine:
    cache = CacheConfig(block_size=block_size, num_device_blocks=16_384 // block_size)
    scheduler = SchedulerConfig(max_num_seqs=16)
    config = embedded_model_config(model.path, model.weights_path, cache, scheduler, max_model_len=2048)
    return InlineEngine(config)


def choices(name: str, prompt: list[int], num_choices: int, max_tokens: int) -> list[AddRequest]:
    return [
        AddRequest(
            f"{name}-{index}",
            prompt,
            SamplingParams(max_tokens=max_tokens, seed=7, choice_index=index, ignore_eos=True),
            0.0,
            fork_of=f"{name}-0" if index else "",
        )
        for index in range(num_choices)
    ]


def beams(name: str, prompt: list[int], num_beams: int, max_tokens: int) -> list[AddRequest]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [AddRequest(name, prompt, params, 0.0, beam_search=BeamSearchParams(num_beams, num_beams))]


class BlockCount:
    """Sums over the steps of one engine."""

    def __init__(self, engine: InlineEngine) -> None:
        self.tables = engine.core.scheduler.kv_cache_manager.block_tables
        self.num_logical = self.num_distinct = 0

    def observe(self) -> None:
        block_ids = [block_id for table in self.tables.values() for block_id in table]
        self.num_logical += len(block_ids)
        self.num_distinct += len(set(block_ids))


def prompts(model: Location, num_prompts: int, num_tokens: int) -> Iterator[list[int]]:
    tokenizer = Tokenizer.load(str(model.path))
    token_ids = tokenizer.encode(ENGLISH.read_text())
    tokenizer.close()
    numbers = random.Random(1)
    for _ in range(num_prompts):
        start = numbers.randrange(len(token_ids) - num_tokens)
        yield token_ids[start : start + num_tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=160, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each output")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    model = locate_embedded_model()
    engine = make_engine(model, options.block_size)
    print(
        f"{options.prompt} + {options.output} tokens, blocks of {options.block_size}: distinct ÷ logical blocks, saved"
    )
    for kind, make, number in (("choices", choices, 4), ("beams", beams, 4), ("beams", beams, 6)):
        count = BlockCount(engine)
        for index, prompt in enumerate(prompts(model, options.prompts, options.prompt)):
            engine.run(make(f"{kind}{number}-{index}", prompt, number, options.output), count.observe)
        ratio = count.num_distinct / count.num_logical
        print(f"{number} {kind:8} {ratio:.3f}  {1 - ratio:.1%}", flush=True)


if __name__ == "__main__":
    main()
