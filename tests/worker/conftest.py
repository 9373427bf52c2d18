"""One thread for tiny models: more of them only wait for each other. And what each tiny request says alone."""

from __future__ import annotations

import pytest
import tiny_llama
import torch
from step_driver import StepDriver
from tiny_runner import CPU, NUM_OUTPUT, PROMPTS, make_runner

from octavo.worker.models.config import read_config
from octavo.worker.weight_loader import load_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    directory = tiny_llama.save(tiny_llama.build(), tmp_path_factory.mktemp("model"))
    config = tiny_llama.engine_config(directory).model
    return load_model(config, read_config(config.path), torch.float32, CPU)


@pytest.fixture(scope="session")
def alone(tiny_model):
    """Each request by itself, its prompt in one step."""
    outputs = {}
    for request_id, prompt in PROMPTS.items():
        driver = StepDriver(make_runner(tiny_model))
        driver.add(request_id, prompt)
        outputs |= driver.run_until(NUM_OUTPUT, chunk=200)
    return outputs
