"""The frozen configuration of one Octavo instance: every default and every check.

`api_server.cli` builds it once from the command line; the supervisor hands it to each process as msgspec bytes.
Invariant: a config that exists is valid and never changes. Values that are measured at run time (how many blocks fit,
how fast a copy is) are not config: they travel in messages. Rejected: environment variables and module constants,
because then import order and inheritance decide what a process does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]  # what JSON, doubles and the codec all carry exactly
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # infinity would break timers
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Dtype(StrEnum):
    """Number format of weights and activations, and of the KV cache unless that has its own."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class WeightsFormat(StrEnum):
    SAFETENSORS = "safetensors"
    GGUF = "gguf"


class Quantization(StrEnum):
    """How the weights of linear layers are held."""

    NONE = "none"  # as numbers of the model's dtype, whatever the file holds
    INT8 = "int8"  # 8 bits each, where the file does not hold them in as few or fewer
    INT4 = "int4"  # 4 bits each, likewise
    AUTO = "auto"  # as the file holds them, where the device multiplies that


class KvCacheDtype(StrEnum):
    """Number format of keys and values in the KV cache."""

    AUTO = "auto"  # the model's dtype
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3
    INT8 = "int8"  # with a scale for each vector


GPU_MAX_NUM_BATCHED_TOKENS = 8192  # what a GPU computes at once without wasting most of itself


class DeviceKind(StrEnum):
    AUTO = "auto"  # a GPU where the worker finds one
    CPU = "cpu"
    CUDA = "cuda"  # AMD's GPUs as well: torch gives them this name


class SchedulingPolicy(StrEnum):
    """Who is admitted next."""

    FCFS = "fcfs"  # first come, first served
    PRIORITY = "priority"  # lower `priority` first, then first come
    LONGEST_PREFIX = "longest-prefix"  # of the first few that wait, the one that finds most of its prompt in the cache


class AdmissionPolicy(StrEnum):
    """When one more request fits."""

    RESERVE_ALL = "reserve-all"  # all that everybody may ever need is free
    WATERMARK = "watermark"  # everybody could take one more block
    PREDICTED_PEAK = "predicted-peak"  # the most that is expected to be needed at any time is free


class PreemptionMode(StrEnum):
    """What happens to the KV of a preempted request."""

    AUTO = "auto"  # the cheaper one by the worker's measured speeds
    SWAP = "swap"  # copied to the host tier, unless that is full
    RECOMPUTE = "recompute"  # given up


class ParserName(StrEnum):
    """Format in which a model writes calls of tools or its thoughts; `api_server.parsers.selection` has the parsers."""

    AUTO = "auto"  # what the chat template writes
    NONE = "none"  # all is text
    DEEPSEEK = "deepseek"
    DEEPSEEK_DSML = "deepseek_dsml"
    GEMMA = "gemma"
    GLM = "glm"
    HARMONY = "harmony"
    HERMES = "hermes"
    KIMI = "kimi"
    KIMI_K3 = "kimi_k3"
    LLAMA_JSON = "llama_json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    QWEN_XML = "qwen_xml"
    THINK = "think"  # thoughts only


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every config struct: frozen, by keyword only, unknown fields refused."""


class DefaultSampling(Config, frozen=True):
    """How a request is sampled where it says nothing, as generation_config.json names it; None leaves it to us.

    Attributes:
        max_new_tokens: length of an answer where neither the request nor its route says one.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Fraction | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    max_new_tokens: Positive | None = None


class ModelConfig(Config, frozen=True):
    """Where the model is and what the processes without torch need to know about it.

    Attributes:
        path: directory with config.json, tokenizer.json and the chat template. For a GGUF file it is the directory
            in the cache into which the file's metadata was written in this form.
        weights_path: the same directory (safetensors), or the `.gguf` file.
        served_model_names: names that clients may use; the first is the one that answers carry.
        max_model_len: tokens of prompt and output together that a request may have.
        vocab_size: width of the logits; every token id must be below it.
        eos_token_ids: ids that end a request with FinishReason.STOP, unless `ignore_eos`.
        dtype: format of weights and activations; `None` lets the worker choose for its device.
        quantization: of the weights of linear layers. `auto` with a dtype of float32 quantises nothing.
        default_sampling: for requests that say less.
    """

    path: str
    weights_path: str
    weights_format: WeightsFormat
    served_model_names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    max_model_len: Positive
    vocab_size: Positive
    eos_token_ids: tuple[int, ...] = ()
    dtype: Dtype | None = None
    quantization: Quantization = Quantization.AUTO
    default_sampling: DefaultSampling = DefaultSampling()


class CacheConfig(Config, frozen=True):
    """KV memory.

    Attributes:
        block_size: token slots in a block.
        kv_cache_dtype: number format of keys and values.
        memory_utilization: on a CPU, the share of what is free after weights and the largest step for KV blocks.
        gpu_memory_utilization: on a GPU, the share of its whole memory that weights, steps and KV blocks may take.
        kv_cache_bytes: exact size of the KV tensor instead of a share of what is free.
        num_device_blocks: exact number of blocks instead of a measured one (tests and experiments).
        enable_prefix_caching: requests share the blocks of equal beginnings.
        swap_space_bytes: memory of the host tier for the blocks of preempted requests.
        kv_offload_bytes: memory of the host tier for evicted blocks of the prefix cache; swaps may take it over.
        num_host_blocks: exact number of host blocks instead of what the two sizes hold (tests and experiments).
        check_swapped_blocks: keep a checksum of every block on the host and compare it when the block comes back.
    """

    block_size: Positive = 16
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    memory_utilization: Fraction = 0.5
    gpu_memory_utilization: Fraction = 0.9
    kv_cache_bytes: Positive | None = None
    num_device_blocks: Positive | None = None
    enable_prefix_caching: bool = True
    swap_space_bytes: NonNegative = 0
    kv_offload_bytes: NonNegative = 0
    num_host_blocks: NonNegative | None = None
    check_swapped_blocks: bool = False


class SchedulerConfig(Config, frozen=True):
    """What one step may hold.

    Attributes:
        max_num_seqs: requests that may hold device blocks at a time.
        max_num_batched_tokens: token budget, the tokens that one step computes over all requests; the default is for
            CPUs, the command line takes GPU_MAX_NUM_BATCHED_TOKENS for GPUs.
        max_tokens_per_request: tokens that one step computes for one request (the chunk of chunked prefill);
            `None` leaves the token budget as the only bound.
        max_steps_in_flight: 2 sends step n+1 before the result of step n is back; 1 is the plain loop, the oracle.
        max_prefill_share: share of the token budget that requests with several tokens to compute may take while
            others wait for one token each: it bounds how much a long prompt slows the others down. A quarter cuts the
            99th percentile of the time per output token to less than a third of what no bound gives, at the same
            throughput and time to first token (simulated, see `tests/simulation/README.md`).
        max_preemptions_per_request: after so many a request is admitted only when it will not be preempted again.
    """

    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 512
    max_tokens_per_request: Positive | None = None
    max_steps_in_flight: Annotated[int, msgspec.Meta(ge=1, le=2)] = 2
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    admission_policy: AdmissionPolicy = AdmissionPolicy.WATERMARK
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    max_prefill_share: Fraction = 0.5
    max_preemptions_per_request: Positive = 4

    def __post_init__(self) -> None:
        """Raise ValueError whose text starts with the name of the field that does not fit the others."""
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must not be above max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request gets a token in every step"
            )


class ParallelConfig(Config, frozen=True):
    """Devices and threads.

    Attributes:
        device: kind of device each worker owns.
        tensor_parallel_size: workers that share one model, over all nodes.
        num_threads: CPU threads of one worker's kernels; `None` takes its share of the cores this process may use.
        enforce_eager: every step runs operation by operation, never as a captured graph (GPU) or recorded list (CPU).
        deterministic: on a GPU, a request's tokens do not depend on who shares its steps; slower. CPUs always do so.
        num_nodes: machines over which the workers are spread evenly.
        node_rank: which of them this is; node 0 has the API server and the engine core.
        master_address: host name or address of node 0, under which the others reach it.
        master_port: TCP port of node 0 for steps and results; the next one is for the workers' rendezvous.
        cluster_key_file: file with the secret that all nodes share.
        node_timeout_s: a node that has not come by then ends the start.
    """

    device: DeviceKind = DeviceKind.AUTO
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    num_threads: Positive | None = None
    enforce_eager: bool = False
    deterministic: bool = False
    num_nodes: Positive = 1
    node_rank: NonNegative = 0
    master_address: Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z:._%-]{1,253}$")] | None = None
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65534)] = 29500
    cluster_key_file: str | None = None
    node_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 60.0

    @property
    def num_local_workers(self) -> int:
        """Workers on each node."""
        return self.tensor_parallel_size // self.num_nodes

    @property
    def local_ranks(self) -> range:
        """Ranks of the workers on this node."""
        first_rank = self.node_rank * self.num_local_workers
        return range(first_rank, first_rank + self.num_local_workers)

    def __post_init__(self) -> None:
        """Raise ValueError whose text starts with the name of the field that does not fit the others."""
        if self.tensor_parallel_size % self.num_nodes:
            raise ValueError(
                f"tensor_parallel_size ({self.tensor_parallel_size}) must be a multiple of num_nodes ({self.num_nodes})"
            )
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank ({self.node_rank}) must be below num_nodes ({self.num_nodes})")
        for field in ("master_address", "cluster_key_file"):
            if self.num_nodes > 1 and not getattr(self, field):
                raise ValueError(f"{field} must be given, because num_nodes is {self.num_nodes}")


class ApiConfig(Config, frozen=True):
    """The HTTP side: where it listens, what it accepts, how it drains.

    Attributes:
        max_queued_requests: requests accepted and not yet finished beyond `max_num_seqs`; more get 429.
        max_queued_tokens: prompt tokens of all accepted requests that have no output yet; more get 429. `None` is
            four times what the KV blocks hold.
        max_body_bytes: size of a request body; more gets 413.
        max_choices: prompts × n of one HTTP request.
        request_timeout_s: longest life of a request; then it ends with an error.
        drain_grace_s: after SIGTERM, time in which new requests are still taken while /ready says 503.
        drain_timeout_s: after that, time that running requests get to finish.
        api_key_file: TOML file with the API keys; `None` serves everybody who reaches the port. Only the API server
            reads it.
        cors_origins: web pages of these origins may use the server from a browser; `*` is all pages.
        tool_call_parser: format in which the model writes calls.
        reasoning_parser: format in which it writes its thoughts.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    max_queued_requests: Positive = 1024
    max_queued_tokens: Positive | None = None
    max_body_bytes: Positive = 8 * 2**20
    max_choices: Positive = 256
    request_timeout_s: Seconds = 600.0
    drain_grace_s: Seconds = 5.0
    drain_timeout_s: Seconds = 30.0
    log_requests: bool = False
    api_key_file: str | None = None
    tool_call_parser: ParserName = ParserName.AUTO
    reasoning_parser: ParserName = ParserName.AUTO
    cors_origins: tuple[Annotated[str, msgspec.Meta(pattern=r"\A(\*|https?://[^\s/,]+)\Z")], ...] = ()


class EngineConfig(Config, frozen=True):
    """Everything that one instance is started with.

    Attributes:
        ipc_directory: fresh directory with mode 0700 that holds the sockets.
        worker_module: module that `python -m` runs as a worker. Another one than the default speaks the same messages
            and computes something else: `octavo.worker.replay` does, and the tests' oracle.
        replay_script: the file that `octavo.worker.replay` plays.
    """

    model: ModelConfig
    ipc_directory: str
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    api: ApiConfig = ApiConfig()
    worker_module: str = "octavo.worker"
    replay_script: str | None = None

    @property
    def engine_address(self) -> str:
        """Socket on which the engine core meets API servers."""
        return f"ipc://{self.ipc_directory}/engine"

    @property
    def worker_address(self) -> str:
        """Socket on which the engine core meets workers, those of other nodes too."""
        if self.parallel.num_nodes == 1:
            return f"ipc://{self.ipc_directory}/worker"
        host = self.parallel.master_address or ""
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.parallel.master_port}"
