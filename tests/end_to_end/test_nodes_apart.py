"""Two nodes on two machines, which here are network namespaces with a link between them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import Namespaces, Nodes, end_of
from oracle import expected_output
from server_process import ServerProcess

from octavo.api_server.generation.output_processor import OutputProcessor
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.lifecycle import ExitCode
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model

VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN = 49152, (2,), 512
PROMPT = "block table"
REAL_WORKER = ("--device", "cpu", "--threads", "1", "--dtype", "float32", "--num-device-blocks", "64")


def expected_text(model: Path, max_tokens: int) -> str:
    """What the oracle answers to PROMPT."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    tokenizer = Tokenizer.load(str(model))
    prompt_token_ids = tokenizer.encode(PROMPT)
    token_ids, reason = expected_output(prompt_token_ids, params, VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN)
    (event,) = OutputProcessor(tokenizer, prompt_token_ids, (), params).process(token_ids, reason, None)
    tokenizer.close()
    return event.content


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


def test_a_real_model_over_two_machines_answers_as_on_one(nodes: Nodes) -> None:
    with ServerProcess(nodes.model, *REAL_WORKER) as alone:
        expected = nodes.complete(alone, PROMPT, 12)
    first, _ = nodes.start_all(worker=REAL_WORKER)
    assert nodes.complete(first, PROMPT, 12) == expected


@pytest.mark.parametrize("victim", [0, 1])
def test_the_loss_of_a_node_in_the_middle_of_a_step_is_told_as_such(nodes: Nodes, victim: int) -> None:
    started = nodes.start_all(worker=REAL_WORKER)
    request = threading.Thread(target=ask_in_vain, args=(nodes, started[0]))
    request.start()
    time.sleep(1.5)  # it computes by then; if not, the test proves less
    started[victim].process_called("supervisor").kill()
    status, (line,) = end_of(started[1 - victim])
    assert status == ExitCode.NODE_LOST
    assert (f"node 0 at {nodes.place} is gone", "node 1 is gone: its worker 1 is not connected any more")[
        victim
    ] in line
    started[victim].wait_until_all_have_ended()
    request.join()


def ask_in_vain(nodes: Nodes, node: ServerProcess) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        nodes.complete(node, PROMPT, 900)
