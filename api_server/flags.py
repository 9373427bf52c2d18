"""The flags of `octavo serve`: each is one field of the config, which also gives its default and its check.

Invariant: a flag that is not given leaves the config's own default, so there is one place for defaults.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

from octavo.protocol.config import ApiConfig, CacheConfig, Config, ParallelConfig, SchedulerConfig

METAVARS = {  # by the last word of a field's name, which is its unit where it has one
    "host": "HOST",
    "s": "SECONDS",
    "bytes": "BYTES",
    "utilization": "SHARE",
    "share": "SHARE",
    "policy": "POLICY",
    "mode": "MODE",
    "file": "FILE",
    "address": "ADDRESS",
    "device": "DEVICE",
    "dtype": "DTYPE",
    "origins": "ORIGINS",
    "parser": "FORMAT",
}


class Flag(NamedTuple):
    """One flag: `section.field` of EngineConfig. A boolean field has no value on the command line."""

    names: tuple[str, ...]
    section: str
    field: str
    help: str

    @property
    def type(self) -> Any:
        """Type of the field, with its bounds."""
        return get_type_hints(SECTIONS[self.section], include_extras=True)[self.field]


FLAGS = (
    Flag(("--host",), "api", "host", "address to listen on"),
    Flag(("--port",), "api", "port", "port to listen on; 0 takes a free one"),
    Flag(("--max-num-seqs",), "scheduler", "max_num_seqs", "requests that may hold KV memory at a time"),
    Flag(
        ("--max-num-batched-tokens",),
        "scheduler",
        "max_num_batched_tokens",
        "token budget: tokens that one step computes over all requests",
    ),
    Flag(
        ("--max-tokens-per-request",),
        "scheduler",
        "max_tokens_per_request",
        "tokens that one step computes for one request, the chunk of chunked prefill; default: the token budget",
    ),
    Flag(
        ("--max-steps-in-flight",),
        "scheduler",
        "max_steps_in_flight",
        "2 sends a step before the result of the previous one is back; 1 is the plain loop",
    ),
    Flag(("--scheduling-policy",), "scheduler", "scheduling_policy", "who is admitted next"),
    Flag(("--admission-policy",), "scheduler", "admission_policy", "when one more request fits"),
    Flag(
        ("--preemption-mode",),
        "scheduler",
        "preemption_mode",
        "what happens to the KV of a preempted request; auto takes what is cheaper by the worker's measured speeds",
    ),
    Flag(
        ("--max-prefill-share",),
        "scheduler",
        "max_prefill_share",
        "share of the token budget that prompts may take while others decode; less bounds how much they slow them down",
    ),
    Flag(
        ("--max-preemptions-per-request",),
        "scheduler",
        "max_preemptions_per_request",
        "after so many a request is admitted only when it will not be preempted again",
    ),
    Flag(("--block-size",), "cache", "block_size", "tokens per KV block"),
    Flag(
        ("--kv-cache-dtype",),
        "cache",
        "kv_cache_dtype",
        "number format of keys and values; auto is that of the model, 8 bits hold twice as many tokens",
    ),
    Flag(
        ("--enable-prefix-caching",),
        "cache",
        "enable_prefix_caching",
        "share the KV blocks of equal beginnings (default), or not",
    ),
    Flag(
        ("--swap-space-gib",),
        "cache",
        "swap_space_bytes",
        "host memory in GiB to which the KV blocks of preempted requests are copied",
    ),
    Flag(
        ("--kv-offload-gib",),
        "cache",
        "kv_offload_bytes",
        "host memory in GiB for KV blocks that the prefix cache would drop",
    ),
    Flag(
        ("--num-host-blocks",),
        "cache",
        "num_host_blocks",
        "exact number of host blocks instead of what the two sizes hold, for experiments",
    ),
    Flag(
        ("--check-swapped-blocks",),
        "cache",
        "check_swapped_blocks",
        "keep a checksum of every block on the host and compare it when the block comes back",
    ),
    Flag(
        ("--memory-utilization",),
        "cache",
        "memory_utilization",
        "on a CPU, share of the memory left after weights and the largest step that KV blocks take",
    ),
    Flag(
        ("--gpu-memory-utilization",),
        "cache",
        "gpu_memory_utilization",
        "on a GPU, share of its whole memory that weights, the largest step and KV blocks take together",
    ),
    Flag(("--device",), "parallel", "device", "what computes; auto takes GPUs where there are some"),
    Flag(("--threads",), "parallel", "num_threads", "CPU threads of a worker; default: its share of the cores"),
    Flag(
        ("--tensor-parallel-size",),
        "parallel",
        "tensor_parallel_size",
        "workers that share the model, one per device, over all nodes",
    ),
    Flag(
        ("--enforce-eager",),
        "parallel",
        "enforce_eager",
        "run steps without captured graphs (GPU) or recorded lists (CPU), to compare with",
    ),
    Flag(
        ("--deterministic",),
        "parallel",
        "deterministic",
        "on a GPU, no answer depends on who shares its steps; slower. On a CPU that is always so",
    ),
    Flag(
        ("--nnodes",),
        "parallel",
        "num_nodes",
        "machines over which the workers are spread evenly; start the same command on each with its own --node-rank",
    ),
    Flag(
        ("--node-rank",),
        "parallel",
        "node_rank",
        "which machine this is; node 0 answers HTTP and schedules, on the others the flags for that do nothing",
    ),
    Flag(("--master-addr",), "parallel", "master_address", "name or address under which the other nodes reach node 0"),
    Flag(
        ("--master-port",),
        "parallel",
        "master_port",
        "TCP port of node 0 for the other nodes; the next one is used too, for the workers' rendezvous",
    ),
    Flag(
        ("--cluster-key-file",),
        "parallel",
        "cluster_key_file",
        "secret that all nodes share, only for its owner's eyes; octavo cluster-key FILE writes one",
    ),
    Flag(("--node-timeout",), "parallel", "node_timeout_s", "seconds in which all nodes must have come"),
    Flag(
        ("--max-queued-requests",),
        "api",
        "max_queued_requests",
        "requests that may wait beyond --max-num-seqs; more are refused with 429",
    ),
    Flag(
        ("--max-queued-tokens",),
        "api",
        "max_queued_tokens",
        "prompt tokens of requests without output, more are refused with 429; default: four times the KV memory",
    ),
    Flag(
        ("--api-key-file",),
        "api",
        "api_key_file",
        "TOML file with the API keys, one [[key]] with name, key or key_sha256, and weight each; default: no keys",
    ),
    Flag(
        ("--cors-origins",),
        "api",
        "cors_origins",
        "web pages that may use the server from a browser, such as https://chat.example,http://localhost:3000; * is "
        "every page that anybody opens on a machine that reaches the server; default: none",
    ),
    Flag(
        ("--tool-call-parser",),
        "api",
        "tool_call_parser",
        "format in which the model writes calls of tools; auto goes by its chat template, none leaves them in the text",
    ),
    Flag(
        ("--reasoning-parser",),
        "api",
        "reasoning_parser",
        "format in which the model writes its thoughts, likewise",
    ),
    Flag(("--log-requests",), "api", "log_requests", "log one line per request, never its text"),
    Flag(("--request-timeout",), "api", "request_timeout_s", "longest life of a request in seconds"),
    Flag(
        ("--drain-grace",),
        "api",
        "drain_grace_s",
        "seconds after SIGTERM in which new requests are still taken, while /ready already says 503",
    ),
    Flag(("--drain-timeout",), "api", "drain_timeout_s", "seconds after that for running requests to finish"),
)
KV_SIZE_FLAGS = (
    Flag(("--kv-cache-memory",), "cache", "kv_cache_bytes", "exact size of the KV memory, such as 512MiB or 2GiB"),
    Flag(("--num-device-blocks",), "cache", "num_device_blocks", "exact number of KV blocks, for experiments"),
)
SECTIONS: dict[str, type[Config]] = {
    "api": ApiConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
}
