"""Runs the real supervisor over fake processes: `fake_instance.py API ENGINE WORKER...`, see fake_child.py."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.api_server.child_process import ProcessSpec
from octavo.api_server.cli import create_ipc_directory, run_guarded
from octavo.api_server.startup_log import StartupLog
from octavo.api_server.stop_signals import SignalInbox
from octavo.api_server.supervisor import API_SERVER, ENGINE_CORE, WORKER, Supervisor
from octavo.protocol.config import ApiConfig, EngineConfig, ModelConfig, WeightsFormat
from octavo.protocol.lifecycle import ExitCode


def specs(api: str, engine: str, *workers: str) -> list[ProcessSpec]:
    def command(title: str, acts: str) -> tuple[str, ...]:
        child = str(Path(__file__).with_name("fake_child.py"))
        return (sys.executable, child, acts if acts.startswith("import") else f"{title.replace(' ', '-')} {acts}")

    return [
        ProcessSpec(API_SERVER, command(API_SERVER, api)),
        *(ProcessSpec(WORKER, command(WORKER, w), i, len(workers), True) for i, w in enumerate(workers)),
        ProcessSpec(ENGINE_CORE, command(ENGINE_CORE, engine)),
    ]


def run(signals: SignalInbox, log: StartupLog) -> ExitCode:
    model = ModelConfig(
        path="/m",
        weights_path="/m",
        weights_format=WeightsFormat.SAFETENSORS,
        served_model_names=("\u2581" * 256,) * 32,  # as many and as long as flags can give
        max_model_len=1,
        vocab_size=1,
    )
    with create_ipc_directory() as directory:
        (directory.path / "engine").touch()
        config = EngineConfig(
            model=model, ipc_directory=str(directory.path), api=ApiConfig(drain_grace_s=0.1, drain_timeout_s=0.1)
        )
        return Supervisor(config, specs(*sys.argv[1:]), signals, log).run()


sys.exit(run_guarded(run))
