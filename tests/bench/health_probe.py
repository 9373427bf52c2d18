"""Measures how long GET URL takes, from a process of its own, until its standard input ends.

    python health_probe.py http://127.0.0.1:8000/health 0.02

prints `probing` once the first probe is through, and JSON at the end.

It is a process because a probe inside the load client would wait for the client's own work and report that as the
server's. It has no event loop and one connection at a time for the same reason. How late the machine woke it up
is reported too (`late_s`): on a busy machine, that much of a latency is not the server's either.

A server that blocks for a second is asked once in that second, where it should have been asked many times. So a latency
L above the interval i counts as the latencies L, L - i, L - 2i, ... of the requests that could not be sent. A failed
probe has no latency (a refused connection is quick); it counts as an error.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

TIMEOUT_S = 10.0


def with_the_unsent(latency_s: float, interval_s: float) -> list[float]:
    """Return the latency and those of the probes that were due while this one waited."""
    latencies_s = [latency_s]
    while latencies_s[-1] > interval_s:
        latencies_s.append(latencies_s[-1] - interval_s)
    return latencies_s


def ask(url: str) -> tuple[float, str | None]:
    """Return the seconds that one GET took, with what was wrong with the answer (None: status 200)."""
    parts = urlsplit(url)
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(parts.netloc, timeout=TIMEOUT_S)
    started_s = time.perf_counter()
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        answer.read()
        error = None if answer.status == 200 else f"HTTP {answer.status}"
    except (OSError, http.client.HTTPException) as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        connection.close()
    return time.perf_counter() - started_s, error


def probe(url: str, interval_s: float) -> dict[str, object]:
    """Ask every `interval_s` until standard input ends."""
    latencies_s: list[float] = []
    late_s: list[float] = []
    errors: list[str] = []
    due_s = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0.0, due_s - time.perf_counter()))[0]:
        late_s.append(time.perf_counter() - due_s)
        latency_s, error = ask(url)
        if error:
            errors.append(error)
        else:
            latencies_s += with_the_unsent(latency_s, interval_s)
        if len(late_s) == 1:
            print("probing", flush=True)
        due_s = max(due_s + interval_s, time.perf_counter())
    return {
        "latencies_s": latencies_s,
        "late_s": late_s,
        "errors": len(errors),
        "first_error": next(iter(errors), None),
    }


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], float(sys.argv[2]))))
