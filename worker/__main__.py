"""`python -m octavo.worker`: a worker process. The model's config is read and checked before torch is imported."""

from __future__ import annotations

from octavo.protocol.lifecycle import Launch, Reporter, run_child
from octavo.worker.models.config import read_config


def main(launch: Launch, reporter: Reporter) -> None:
    model_config = read_config(launch.config.model.path)
    from octavo.worker.worker import run_worker  # torch takes a second to import, a wrong model is known at once

    reporter.progress("torch")
    run_worker(launch, model_config, reporter)


if __name__ == "__main__":
    run_child("worker", main)
