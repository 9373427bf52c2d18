"""`python -m octavo.engine_core`: started by the supervisor, which hands it its Launch."""

from __future__ import annotations

from octavo.engine_core.server import serve
from octavo.protocol.lifecycle import Launch, Reporter, run_child


def main(launch: Launch, reporter: Reporter) -> None:
    serve(launch.config, reporter)


if __name__ == "__main__":
    run_child("engine_core", main)
