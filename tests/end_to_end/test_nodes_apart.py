"""Two nodes on two machines, which here are network namespaces with a link between them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import Namespaces, Nodes, end_of
from oracle import expected_output

from octavo.api_server.output_processor import OutputProcessor
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.lifecycle import ExitCode
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model

VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN = 49152, (2,), 512
PROMPT = "block table"
REAL_WORKER = ("--device", "cpu", "--dtype", "float32", "--num-device-blocks", "64")


def expected_text(model: Path, max_tokens: int) -> str:
    """What the oracle answers to PROMPT."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    tokenizer = Tokenizer.load(str(model))
    prompt_token_ids = tokenizer.encode(PROMPT)
    token_ids, reason = expected_output(prompt_token_ids, params, VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN)
    text: str = OutputProcessor(tokenizer, prompt_token_ids, (), params).process(token_ids, reason, None).text
    tokenizer.close()
    return text


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    try:
        namespaces = Namespaces()
    except FileNotFoundError:
        pytest.skip("needs the ip command (Debian: iproute2)")
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"needs the right to make network namespaces: {problem.stderr.strip()}")
    yield namespaces
    namespaces.remove()


@pytest.fixture
def nodes(namespaces: Namespaces, smollm2_gguf: Path, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(smollm2_gguf, tmp_path, namespaces.ADDRESSES[0], namespaces.prefixes)
    yield nodes
    nodes.destroy()


def test_requests_are_served_and_a_link_that_is_cut_is_noticed_on_both_sides(
    nodes: Nodes, namespaces: Namespaces, smollm2_directory: Path
) -> None:
    first, second = nodes.start_all("--max-model-len", str(MAX_MODEL_LEN))
    assert nodes.complete(first, PROMPT, 40) == expected_text(smollm2_directory, 40)

    namespaces.cut()
    status, (line,) = end_of(first)
    assert status == ExitCode.NODE_LOST
    assert "node 1 is gone: its worker 1 is not connected any more" in line
    status, (line,) = end_of(second)
    assert status == ExitCode.NODE_LOST
    assert f"node 0 at {nodes.place} is gone" in line
