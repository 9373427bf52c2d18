"""The nodes of an instance as real processes: on loopback, or each in a network namespace of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from server_process import ORACLE_ARGUMENTS, ServerProcess, wait_until

from octavo.protocol.cluster_key import write_cluster_key

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ip"
POST_PROGRAM = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def free_port_pair() -> int:
    """Return a TCP port that is free, and the next one is too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


class Nodes:
    """Starts the nodes of one instance for one test; `prefixes` are the commands that run each on its machine."""

    def __init__(
        self, model: str | Path, directory: Path, address: str, prefixes: Sequence[Sequence[str]] = ((), ())
    ) -> None:
        self.model = model
        self.address = address
        self.port = free_port_pair()
        self.prefixes = prefixes
        self.key_file = directory / "cluster.key"
        write_cluster_key(self.key_file)
        self.started: list[ServerProcess] = []

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"

    def start(
        self, node_rank: int, *arguments: str, worker: Sequence[str] = ORACLE_ARGUMENTS, timeout_s: float = 60
    ) -> ServerProcess:
        node = ServerProcess(
            self.model,
            *worker,
            *("--tensor-parallel-size", str(len(self.prefixes)), "--nnodes", str(len(self.prefixes))),
            *("--node-rank", str(node_rank), "--master-addr", self.address, "--master-port", str(self.port)),
            *("--cluster-key-file", str(self.key_file), "--node-timeout", str(timeout_s), *arguments),
            prefix=self.prefixes[node_rank],
        )
        self.started.append(node)
        return node

    def start_all(self, *arguments: str, worker: Sequence[str] = ORACLE_ARGUMENTS) -> list[ServerProcess]:
        """Start every node and wait until all of them serve."""
        nodes = [self.start(rank, *arguments, worker=worker) for rank in range(len(self.prefixes))]
        for node in nodes:
            wait_serving(node)
        return nodes

    def complete(self, node: ServerProcess, prompt: str, max_tokens: int) -> str:
        """Return the text with which `node` answers a client on its machine, greedily and without an end."""
        body = {
            "model": Path(self.model).stem,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        command = [
            *(*node.prefix, sys.executable, "-c", POST_PROGRAM),
            *(f"{node.url}/v1/completions", json.dumps(body)),
        ]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout)
        text: str = answer["choices"][0]["text"]
        return text

    def destroy(self) -> None:
        for node in self.started:
            node.destroy()


def wait_serving(node: ServerProcess) -> None:
    """Wait for the line that says so; fail when the node has ended."""
    wait_until(lambda: "  ready " in node.stderr or node.process.poll() is not None, f"readiness; {node.stderr}")
    assert node.process.poll() is None, node.stderr


def end_of(node: ServerProcess) -> tuple[int, list[str]]:
    """Wait for the end of a node; return its exit status and its lines of error, when nothing else is left of it."""
    status = node.wait()
    node.assert_nothing_is_left()
    return status, [line for line in node.stderr.splitlines() if line.startswith("octavo: error: ")]


class Namespaces:
    """Two network namespaces and the link between them: two machines, as far as sockets can tell."""

    ADDRESSES = ("10.231.77.1", "10.231.77.2")

    def __init__(self) -> None:
        """Raises OSError or CalledProcessError where that is not possible or not permitted."""
        tag = secrets.token_hex(3)
        self.names = [f"octavo-{tag}-{node}" for node in range(2)]
        links = [f"oct{tag}{node}" for node in range(2)]
        self._links = links
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first_end, second_end = (
                ("name", link, "netns", name) for link, name in zip(links, self.names, strict=True)
            )
            _ip("link", "add", *first_end, "type", "veth", "peer", *second_end)
            for name, link, address in zip(self.names, links, self.ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            self.remove()
            raise

    @property
    def prefixes(self) -> list[tuple[str, ...]]:
        """Commands that run another command in each namespace."""
        return [(IP, "netns", "exec", name) for name in self.names]

    def cut(self) -> None:
        """Take the link down: neither side hears anything any more, not even the end of a connection."""
        _ip("-n", self.names[1], "link", "set", self._links[1], "down")

    def remove(self) -> None:
        for name in self.names:
            if os.path.exists(f"/run/netns/{name}"):
                _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True, text=True, timeout=10)
