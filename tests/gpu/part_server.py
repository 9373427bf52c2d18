"""The whole server on the device with `--tensor-parallel-size 1`: answers, the same under load as alone, and speed."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from embedded_model import EMBEDDED_MODEL
from gpu_part import Options, Report, run_part
from server_process import ServerProcess

PROMPT = "The three largest cities of France are"


def complete(server: ServerProcess, prompt: str, max_tokens: int) -> str:
    body = {"model": "checked", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(  # noqa: S310 - our own URL
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.loads(answer.read())["choices"][0]["text"]


def main(options: Options, report: Report) -> None:
    num_requests, num_tokens = (4, 8) if options.is_tiny else (64, 128)
    flags = ("--device", options.device.value, "--tensor-parallel-size", "1", "--served-model-name", "checked")
    started_s = time.monotonic()
    with ServerProcess(options.model or EMBEDDED_MODEL, *flags, "--deterministic") as server:
        report.add("start of the server", f"{time.monotonic() - started_s:.1f} s")
        alone = complete(server, PROMPT, num_tokens)
        report.add("an answer", repr(alone[:60]), bool(alone.strip()))
        prompts = [PROMPT, *(f"{index} {PROMPT}" for index in range(1, num_requests))]
        with ThreadPoolExecutor(num_requests) as pool:
            started_s = time.monotonic()
            answers = list(pool.map(lambda prompt: complete(server, prompt, num_tokens), prompts))
            elapsed_s = time.monotonic() - started_s
        report.add("the same answer under load", str(answers[0] == alone), answers[0] == alone)
        speed = f"{num_requests * num_tokens / elapsed_s:.0f} tokens/s, {num_requests} at once, deterministic"
        report.add("through HTTP", speed)


if __name__ == "__main__":
    run_part(main)
