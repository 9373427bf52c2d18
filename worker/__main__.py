"""`python -m octavo.worker`: a worker process.

What must happen before torch is imported happens here: the model's config is read and checked, because torch takes a
second to import, and the C library of torch's threads gets its one setting that has no other way in.
"""

from __future__ import annotations

import os

from octavo.protocol.lifecycle import Launch, Reporter, run_child
from octavo.worker.models.config import read_config

# Loops for which a thread of libgomp (torch's OpenMP on Linux) waits awake for the others before it sleeps. By its own
# default it waits for milliseconds, and when anything else wants a core, those that wait keep the one that is waited
# for from running: on two busy cores a step took 15 to 25 times as long. With 1000 loops that is gone; on idle cores a
# step is up to a tenth slower than by default.
LIBGOMP_SPIN_COUNT = "1000"


def main(launch: Launch, reporter: Reporter) -> None:
    model_config = read_config(launch.config.model.path)
    os.putenv("GOMP_SPINCOUNT", LIBGOMP_SPIN_COUNT)  # libgomp reads it when torch loads it, and never again
    from octavo.worker.worker import run_worker

    reporter.progress("torch")
    run_worker(launch, model_config, reporter)


if __name__ == "__main__":
    run_child("worker", main)
