"""The raw outputs of canitoolcall's nine families, whole and cut in its ways; skipped where it is not installed."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("canitoolcall")
pytest.importorskip("jsonschema")

from canitoolcall.adapters.base import ReplayInput
from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import ChunkStrategy, split, split_text
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, Status
from canitoolcall_adapter import FAMILIES, OctavoAdapter

STRATEGIES = [ChunkStrategy.parse(name) for name in ("one", "special", "token", *(f"rand:{n}:8" for n in range(1, 6)))]
CHARACTERS = [ChunkStrategy.parse(name) for name in ("char:0", "char:1", "char:2")]
GOOD = {Status.PASS, Status.SOFT_PASS}


def observe(fixture: Fixture) -> Observation:
    adapter = OctavoAdapter()
    raw = ReplayInput.from_fixture(fixture, load_families()[fixture.family])
    units = adapter.units(raw)
    special = frozenset(adapter.special_token_ids(raw))
    streams = {each.id: adapter.parse_stream(raw, split(units, each, special), fixture.tools) for each in STRATEGIES}
    for each in CHARACTERS:
        streams[each.id] = adapter.parse_stream_text(raw, split_text(raw.text, each), fixture.tools)
    return Observation(nonstream=adapter.parse(raw, fixture.tools), streams=streams)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_outputs(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    fixtures = [each for each in load_fixtures() if each.family == family]
    counts: Counter[Status] = Counter()
    problems = []
    for fixture in fixtures:
        rows = run_checks(fixture, load_families()[family], observe(fixture))
        status = case_status(rows)
        # The package does not count splits inside markers; for us they are splits like any other.
        status = status if all(row.status in GOOD for row in rows) else Status.FAIL
        counts[status] += 1
        if status not in GOOD:
            first = next(row for row in rows if row.status not in GOOD)
            problems.append(f"{fixture.id}: {first.check} {first.strategy}: {first.detail}")
    num_good = sum(counts[status] for status in GOOD)
    with capsys.disabled():
        print(f"\n{family}: {num_good} of {len(fixtures)}, {counts[Status.PASS]} of them to the letter")
        print(*problems, sep="\n")
    assert num_good >= 0.95 * len(fixtures)
