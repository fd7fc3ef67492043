"""`equipoise advise`: its options, its checks, and the run from statistics to advice."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli import kinds
from equipoise.cli.files import write_file
from equipoise.cli.hardware_options import (
    MACHINE,
    MACHINE_OPTIONS,
    MEMORY_OPTIONS,
    MODEL_OPTIONS,
    HardwareRequest,
    check_hardware,
    check_part,
    check_slots,
    dead_zone_of,
    expert_of,
    hardware_of,
    kv_cache_of,
)
from equipoise.cli.offline import (
    MAX_SLOTS,
    check_outputs,
    check_ranks,
    load_placement,
    load_statistics,
    print_written,
    request_values,
    usage_errors,
)
from equipoise.cli.option import Option
from equipoise.cli.option_checks import check_count
from equipoise.cli.progress import part_progress_for
from equipoise.cli.trace_options import (
    TRACE_OPTIONS,
    TraceRequest,
    check_trace,
    open_trace,
    steps_of,
)
from equipoise.hal.errors import UsageError

SHAPE, OUTPUT = "what serves", "output"

OPTIONS = (
    Option(key="ranks", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed", help="ranks that serve"),
    Option(key="slots", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed, or as many as are advised",
           help="slots per layer over all ranks, a multiple of them"),
    Option(key="installed", kind=kinds.PATH, group=SHAPE, metavar="FILE",
           shown_default="experts in their order, one replica each",
           help="placement that runs now, in any format"),
    Option(key="target", kind=kinds.REAL, group=SHAPE, metavar="X", shown_default="0.02",
           help="imbalance, max/mean - 1 of the ranks, that is good enough"),
    Option(key="step_rows", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of a window",
           help="rows of a layer in a step, over all ranks: tokens times experts of a token"),
    *TRACE_OPTIONS,
    *MODEL_OPTIONS,
    *MACHINE_OPTIONS,
    Option(key="itl", kind=kinds.REAL, group=MACHINE, metavar="MS", shown_default="none",
           help="inter-token latency to keep, in ms: also how long a step is; needs --hardware"),
    Option(key="moe_share", kind=kinds.REAL, group=MACHINE, metavar="X", shown_default="0.5",
           help="part of --itl that the experts of all layers may take"),
    *MEMORY_OPTIONS,
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there, with the source of each of the hardware's"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class AdviseRequest(HardwareRequest, TraceRequest):
    """What one `equipoise advise` was asked for; `progress` is `shown` or `hidden`."""

    statistics: Path
    ranks: int | None = None
    slots: int | None = None
    installed: Path | None = None
    target: float = 0.02
    step_rows: int | None = None
    moe_share: float | None = None
    json: Path | None = None
    progress: str = "shown"


if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
    from equipoise.report.advice.advice import Advice

MAX_ROWS = 2**40


def advise(arguments: Namespace, command: str) -> int:
    """Read statistics, answer the questions, write the figures, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.advice.table import render
    from equipoise.report.terminal import stdout_colour_mode

    request = request_of(vars(arguments))
    _validate(request)
    advice = _advice(request)
    try:
        # Before the table: a closed standard output must not cost the file.
        _write(request, advice, command)
    finally:
        print(render(advice, stdout_colour_mode()), flush=True)
    return 0


def request_of(arguments: Mapping[str, Any]) -> AdviseRequest:
    """What the command line asks for, its configuration file included."""
    return AdviseRequest(**request_values(arguments, BY_KEY))


def _validate(request: AdviseRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    if request.ranks is None and request.installed is None:
        raise UsageError("--ranks is needed: there is no --installed to read it from")
    check_ranks(request.ranks)
    for flag, value, most in (
        ("--slots", request.slots, MAX_SLOTS),
        ("--step-rows", request.step_rows, MAX_ROWS),
    ):
        if value is not None:
            check_count(flag, value, most)
    check_part("--moe-share", request.moe_share)
    if not 0 <= request.target <= 1000:
        raise UsageError(f"--target must be 0 to 1000, got {request.target:g}")
    check_trace(request)
    check_hardware(request)
    if request.itl is not None and request.hardware is None:
        raise UsageError("--itl needs --hardware: without it nothing is known of time")
    if request.moe_share is not None and request.itl is None:
        raise UsageError("--moe-share needs --itl, of which it is a part")
    inputs = {"STATS": request.statistics}
    if request.installed is not None:
        inputs["--installed"] = request.installed
    check_outputs(inputs, {"--json": request.json})


def _advice(request: AdviseRequest) -> "Advice":
    from equipoise.report.advice.advice import advise as answers
    from equipoise.report.advice.inputs import AdviceInputs

    hardware = hardware_of(request, moves=request.itl is not None)
    statistics, step_rows = _load(request)
    installed = _load_installed(request, statistics)
    ranks = request.ranks if installed is None else installed.ranks
    assert ranks is not None
    if request.slots is not None:
        check_slots(request.slots, statistics.experts, ranks)
    question = AdviceInputs(
        statistics=statistics,
        ranks=ranks,
        slots=request.slots,
        installed=installed,
        target=request.target,
        step_rows=request.step_rows or step_rows,
        expert=expert_of(request),
        hardware=hardware,
        latency=None if request.itl is None else request.itl / 1e3,
        kv_cache=kv_cache_of(request, hardware),
        dead_zone=dead_zone_of(request),
        **_explicit_options(request, "link", "memory_share", "moe_share", "kv_usage"),
    )
    parts = part_progress_for(request.progress, "planning")
    try:
        with usage_errors():
            return answers(question, parts.start_part)
    finally:
        parts.close()


def _explicit_options(request: AdviseRequest, *keys: str) -> dict[str, Any]:
    """Those options that were given; the others are as `AdviceInputs` has them."""
    return {key: value for key in keys if (value := getattr(request, key)) is not None}


def _load(request: AdviseRequest) -> "tuple[ExpertStatistics, int | None]":
    """Statistics, and rows of a layer in a step where windows are sums of several.

    Statistics are taken as they are; what holds tokens, or many steps, is summed into windows.
    """
    from equipoise.balancer.formats import CountsTrace
    from equipoise.report.replay.windows import MAX_WINDOWS, windows_of

    trace = open_trace(request.statistics, request)
    if isinstance(trace, CountsTrace) and trace.steps <= MAX_WINDOWS:
        return load_statistics(request.statistics), None
    with usage_errors():
        windows = windows_of(steps_of(trace, request, request.ranks or 1))
    if not windows.statistics.layers:
        raise UsageError(f"{request.statistics}: all counts are 0: there is nothing to balance")
    return windows.statistics, windows.step_rows


def _load_installed(
    request: AdviseRequest, statistics: "ExpertStatistics"
) -> "ExpertPlacement | None":
    if request.installed is None:
        return None
    from equipoise.report.placement.spread import select_layers

    placement = load_placement("--installed", request.installed, request.ranks)
    with usage_errors(f"--installed: {request.installed}"):
        return select_layers(placement, statistics)


def _write(request: AdviseRequest, advice: "Advice", command: str) -> None:
    from equipoise.report.advice.json_output import to_json

    if request.json is None:
        return
    about = {"command": command, "statistics": str(request.statistics)}
    text = json.dumps(about | to_json(advice), indent=2, allow_nan=False)
    place = write_file(request.json, text + "\n")
    print_written(request.progress, [f"figures: {place}"])
