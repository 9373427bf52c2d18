"""`python -m octavo.worker`: a worker process.

It reaches the engine core before anything else, because a missing node has to be known soon; then the model's config is
read and checked before torch is imported.
"""

from __future__ import annotations

from octavo.protocol.lifecycle import Launch, Reporter, run_child
from octavo.protocol.worker_link import WorkerLink
from octavo.worker.layers.shares import check_split
from octavo.worker.models.config import read_config


def main(launch: Launch, reporter: Reporter) -> None:
    with WorkerLink(launch, reporter) as link:
        model_config = read_config(launch.config.model.path)
        check_split(
            model_config.num_query_heads,
            model_config.num_kv_heads,
            model_config.intermediate_size,
            model_config.vocab_size,
            launch.config.parallel.tensor_parallel_size,
        )
        from octavo.worker.worker import run_worker  # torch takes a second to import, a wrong model is known at once

        reporter.progress("torch")
        run_worker(launch, model_config, link, reporter)


if __name__ == "__main__":
    run_child("worker", main)
