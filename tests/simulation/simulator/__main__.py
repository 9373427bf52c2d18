"""The command `octavo simulate`: options in, a table, JSON and a picture out.

Every option is a field of Settings; `--compare` parses the same command line once for each value of one option, so
whatever can be set can be compared.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from octavo.protocol.config import AdmissionPolicy, PreemptionMode, SchedulingPolicy
from octavo.simulator.devices import DEVICES, MODELS
from octavo.simulator.plots import MissingMatplotlibError, require_matplotlib, write_plot
from octavo.simulator.report import as_json, as_text
from octavo.simulator.run import run
from octavo.simulator.settings import Allocation, Batching, Reservation, Settings


def make_parser() -> argparse.ArgumentParser:
    """The options; destinations are the names of the fields of Settings, and an option left out sets none."""
    parser = argparse.ArgumentParser(
        prog="octavo simulate",
        description="Replay a trace with the real scheduler and the step times of another device.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _add_workload_options(parser.add_argument_group("workload"))
    _add_device_options(parser.add_argument_group("device and model"))
    _add_scheduler_options(parser.add_argument_group("scheduler"))
    _add_contiguous_options(parser.add_argument_group("servers without paging"))
    output = parser.add_argument_group("output")
    output.add_argument("--compare", metavar="OPTION=A,B,…", help="one run for each value, side by side")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the reports as a JSON list")
    output.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG (needs matplotlib)")
    return parser


def _add_workload_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", required=True, help="file of an Azure or Mooncake trace, or fixed:PROMPTxOUTPUT")
    group.add_argument("--num-requests", type=int, help="only the first so many")
    group.add_argument("--rate-scale", type=float, help="2: arrivals come twice as fast")
    group.add_argument("--saturated", dest="is_saturated", action="store_true", help="all requests come at once")
    group.add_argument("--length-scale", type=float, help="0.5: prompts and outputs are half as long")
    group.add_argument("--max-model-len", type=int, help="longer requests are cut")
    group.add_argument("--max-tokens", type=int, help="that requests ask for; default: what their context leaves")


def _add_device_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", choices=sorted(DEVICES))
    group.add_argument("--num-devices", type=int, help="that share the model, at no cost of communication")
    group.add_argument("--model-preset", dest="model", choices=sorted(MODELS))
    group.add_argument("--num-device-blocks", type=int, help="default: what the weights leave of the memory")
    group.add_argument("--num-host-blocks", type=int)
    group.add_argument("--block-size", type=int)


def _add_scheduler_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-num-seqs", type=int)
    group.add_argument("--max-num-batched-tokens", type=int)
    group.add_argument("--max-prefill-share", type=float)
    group.add_argument("--max-steps-in-flight", type=int, choices=(1, 2))
    _add_choice(group, "--admission-policy", AdmissionPolicy)
    _add_choice(group, "--preemption-mode", PreemptionMode)
    _add_choice(group, "--scheduling-policy", SchedulingPolicy)
    group.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_false")


def _add_contiguous_options(group: argparse._ArgumentGroup) -> None:
    _add_choice(group, "--reservation", Reservation)
    _add_choice(group, "--allocation", Allocation)
    _add_choice(group, "--batching", Batching)


def _add_choice(group: argparse._ArgumentGroup, name: str, choices: type[StrEnum]) -> None:
    group.add_argument(name, choices=[choice.value for choice in choices])


def variants(arguments: Sequence[str], compare: str | None) -> tuple[str, dict[str, list[str]]]:
    """Return what the runs differ in, and their command lines by its value.

    Raises ValueError for a `--compare` that is not OPTION=A,B,…
    """
    if compare is None:
        return "", {"simulated": list(arguments)}
    option, _, values = compare.removeprefix("--").partition("=")
    if not option or not values:
        raise ValueError(f"--compare must be OPTION=A,B,…, got {compare!r}")
    if option.replace("-", "_") not in {*Settings.__struct_fields__, "model_preset"}:
        raise ValueError(f"--compare knows no option --{option}")
    return option, {value: [*arguments, f"--{option}", value] for value in values.split(",")}


def settings_of(arguments: Sequence[str]) -> Settings:
    """The settings of one run. Raises msgspec.ValidationError that names the field that is out of range."""
    given = vars(make_parser().parse_args(arguments))
    fields = {name: value for name, value in given.items() if name in Settings.__struct_fields__}
    return msgspec.convert(fields, Settings)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser()
    output = parser.parse_args(arguments)
    plot_path, json_path = getattr(output, "plot", None), getattr(output, "json", None)
    try:
        title, lines = variants(arguments, getattr(output, "compare", None))
        runs = {name: settings_of(line) for name, line in lines.items()}
        if plot_path is not None:
            require_matplotlib()
        for path in (json_path, plot_path):
            if path is not None:
                path.open("ab").close()  # better now than after the run
        results = [run(settings) for settings in runs.values()]
    except (ValueError, OSError, MissingMatplotlibError) as problem:
        parser.error(str(problem))
    reports = [report for report, _ in results]
    print(as_text(title, list(runs), reports))
    if json_path is not None:
        json_path.write_bytes(as_json(reports))
    if plot_path is not None:
        write_plot(plot_path, title, list(runs), reports, [measured for _, measured in results])
    return 0


if __name__ == "__main__":
    logging.getLogger("octavo.engine_core").setLevel(logging.ERROR)  # the report counts preemptions
    sys.exit(main(sys.argv[1:]))
