"""What all nodes must have been started with alike, and how to say where they differ.

Each node has its own command line. Invariant: a field of the config that is not listed here as a node's own affair must
be equal everywhere, so that a new field is compared from its first day. Rejected: sending node 0's config to the
others, because paths, memory and threads differ between machines for good reasons.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import PROTOCOL_VERSION
from octavo.protocol.lifecycle import ExitCode, StartupError

COMPARED_SECTIONS = ("model", "cache", "scheduler", "parallel")
OWN_FIELDS = {  # of each node; the smallest KV memory of all nodes counts
    *("path", "weights_path", "served_model_names"),
    *("memory_utilization", "gpu_memory_utilization", "kv_cache_bytes", "swap_space_bytes", "kv_offload_bytes"),
    *("num_device_blocks", "num_host_blocks", "num_threads"),
    *("node_rank", "master_address", "master_port", "cluster_key_file", "node_timeout_s"),
}
Agreement = dict[str, str]


def agreement_of(config: EngineConfig) -> Agreement:
    """Return what must be alike, by name, as text; raises StartupError when the model's config cannot be read."""
    fields: Agreement = {"octavo version": metadata.version("octavo"), "protocol version": str(PROTOCOL_VERSION)}
    fields["config.json"] = f"SHA-256 {_digest_of(Path(config.model.path) / 'config.json')}"
    for section in COMPARED_SECTIONS:
        for name, value in msgspec.structs.asdict(getattr(config, section)).items():
            if name not in OWN_FIELDS:
                fields[name] = "the default" if value is None else str(value)
    return fields


def difference(ours: Agreement, theirs: Agreement, node: int) -> str:
    """Return in words what is not alike first, empty when all is; `theirs` is that of `node`, ours that of node 0."""
    for name in (*ours, *theirs):
        own, other = ours.get(name, "not known"), theirs.get(name, "not known")
        if own != other:
            return (
                f"{name} is {other} on node {node} and {own} on node 0: start all nodes with the same model and flags"
            )
    return ""


def missing_nodes(nodes: Sequence[int], ranks: Sequence[int], limit_s: float) -> str:
    """Return in words that nothing was heard of these workers of these nodes within `limit_s`."""
    which = f"{'nodes' if len(nodes) > 1 else 'node'} {', '.join(map(str, nodes))}"
    workers = f"{'workers' if len(ranks) > 1 else 'worker'} {', '.join(map(str, ranks))}"
    return (
        f"no sign of {which} ({workers}) within {limit_s:g} s: start all nodes, and see the log of each that is missing"
    )


def _digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as problem:
        raise StartupError(ExitCode.BAD_WEIGHTS, f"cannot read {path}: {problem.strerror}") from problem
