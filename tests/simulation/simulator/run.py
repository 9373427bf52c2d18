"""From settings to a report: one run, of the real scheduler or of a contiguous policy."""

from __future__ import annotations

from octavo.simulator.contiguous import ContiguousSimulation
from octavo.simulator.measurements import Measurements
from octavo.simulator.report import NO_STATS, Report, make_report
from octavo.simulator.settings import Reservation, Settings, Setup
from octavo.simulator.simulation import Simulation


def run(settings: Settings) -> tuple[Report, Measurements]:
    """Simulate; same settings, same result. Raises ValueError for settings that cannot run."""
    setup = Setup(settings)
    shapes = setup.shapes()
    if settings.reservation is Reservation.PAGED:
        simulation = Simulation(setup, shapes)
        stats, measured = simulation.run(), simulation.measurements
    else:
        contiguous = ContiguousSimulation(setup, shapes)
        contiguous.run()
        stats, measured = NO_STATS, contiguous.measurements
    return make_report(settings, setup.num_device_blocks, setup.cost_model.block_bytes, measured, stats), measured
