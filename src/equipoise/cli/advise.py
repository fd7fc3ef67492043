"""`equipoise advise`: its options, its checks, and the run from statistics to advice."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from equipoise.cli.command import Command
from equipoise.cli.hardware_options import (
    MACHINE,
    MAX_STEP,
    HardwareRequest,
    check_hardware,
    check_slots,
    dead_zone_of,
    expert_of,
    hardware_of,
    kv_cache_of,
)
from equipoise.cli.offline import (
    MAX_RANKS,
    MAX_SLOTS,
    STATISTICS,
    check_outputs,
    drop_empty_layers,
    load_placement,
    load_statistics,
    print_written,
    ranks_to_serve,
    usage_errors,
    warn_of_dropped_layers,
    write_figures,
)
from equipoise.cli.progress import part_progress_for
from equipoise.cli.trace_options import (
    TraceRequest,
    open_trace,
    recorders_of,
    steps_of,
)
from equipoise.hal.errors import UsageError
from equipoise.option import OUTPUT, Option

SHAPE = "what serves"
ADVISE = """\
Say of recorded load whether balancing is worth it, with how many redundant slots
and on how many ranks; and, for given hardware and latency, how fast experts move
and when a move pays. A model, not a measurement: the page Advice has its formulas."""
EXAMPLES = """\
examples:
  equipoise advise recorded/ --ranks 32
  equipoise advise recorded/ --ranks 32 --hardware h200 --itl 50 \\
      --hidden 7168 --intermediate 2048
  equipoise advise counts.csv --installed placement.json --hardware mine.yaml \\
      --itl 50 --expert-bytes 24MiB --link host --json advice.json

exit code: 0 advised, 2 bad input, 3 something could not be written"""
MAX_ROWS = 2**40


@dataclass(frozen=True, kw_only=True)
class AdviseRequest(HardwareRequest, TraceRequest):
    """What one `equipoise advise` was asked for."""

    # fmt: off
    statistics: Annotated[Path, STATISTICS]
    ranks: Annotated[int | None, Option(
        "ranks that serve", SHAPE, least=1, most=MAX_RANKS,
        default="those of --installed, or that recorded")] = None
    slots: Annotated[int | None, Option(
        "slots per layer over all ranks, a multiple of them", SHAPE, least=1, most=MAX_SLOTS,
        default="those of --installed, or as many as are advised")] = None
    installed: Annotated[Path | None, Option(
        "placement that runs now, in any format", SHAPE,
        default="experts in their order, one replica each")] = None
    target: Annotated[float, Option(
        "imbalance, max/mean - 1 of the ranks, that is good enough", SHAPE, least=0, most=1000
    )] = 0.02
    step_rows: Annotated[int | None, Option(
        "rows of a layer in a step, over all ranks: tokens times experts of a token", SHAPE,
        least=1, most=MAX_ROWS, default="those of a window")] = None
    itl: Annotated[float | None, Option(
        "inter-token latency to keep, in ms: also how long a step is", MACHINE,
        needs=("hardware", "without it nothing is known of time"),
        least=0, above=True, most=MAX_STEP, metavar="MS")] = None
    moe_share: Annotated[float | None, Option(
        "part of --itl that the experts of all layers may take", MACHINE,
        needs=("itl", "it is a part of that"), least=0, above=True, most=1, default="0.5")] = None
    json: Annotated[Path | None, Option(
        "write the figures there, with the source of each of the hardware's", OUTPUT)] = None
    # fmt: on


if TYPE_CHECKING:
    from equipoise.balancer.formats import (
        CountsTrace,
        ExpertPlacement,
        ExpertStatistics,
        RoutingTrace,
    )
    from equipoise.report.advice.advice import Advice


def advise(request: AdviseRequest, command: str) -> int:
    """Read statistics, answer the questions, write the figures, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.advice.table import render
    from equipoise.report.terminal import stdout_colour_mode

    _validate(request)
    advice = _advice(request)
    try:
        # Before the table: a closed standard output must not cost the file.
        _write(request, advice, command)
    finally:
        print(render(advice, stdout_colour_mode()), flush=True)
    return 0


def _validate(request: AdviseRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    check_hardware(request)
    inputs = {"STATS": request.statistics}
    if request.installed is not None:
        inputs["--installed"] = request.installed
    check_outputs(inputs, {"--json": request.json})


def _advice(request: AdviseRequest) -> "Advice":
    from equipoise.report.advice.advice import advise as answers
    from equipoise.report.advice.inputs import AdviceInputs

    hardware = hardware_of(request, moves=request.itl is not None)
    trace = open_trace(request.statistics, request)
    statistics, step_rows = _load(request, trace)
    installed = _load_installed(request, statistics)
    if installed is not None:
        ranks = installed.ranks
    else:
        ranks = ranks_to_serve(request.ranks, request.statistics, recorders_of(trace))
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


def _load(
    request: AdviseRequest, trace: "CountsTrace | RoutingTrace"
) -> "tuple[ExpertStatistics, int | None]":
    """Statistics, and rows of a layer in a step where windows are sums of several.

    Statistics are taken as they are; what holds tokens, or many steps, is summed into windows.
    """
    from equipoise.balancer.formats import CountsTrace
    from equipoise.report.replay.windows import MAX_WINDOWS, windows_of

    if isinstance(trace, CountsTrace) and trace.steps <= MAX_WINDOWS:
        statistics = load_statistics(request.statistics)
        return drop_empty_layers(request.statistics, statistics), None
    with usage_errors():
        windows = windows_of(steps_of(trace, request, request.ranks or 1))
    if not windows.statistics.layers:
        raise UsageError(f"{request.statistics}: all counts are 0: there is nothing to balance")
    if isinstance(trace, CountsTrace):
        warn_of_dropped_layers(request.statistics, trace.empty_layers)
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

    about = {"command": command, "statistics": str(request.statistics)}
    print_written(request.progress, write_figures(request.json, about | to_json(advice)))


COMMAND = Command(AdviseRequest, advise, description=ADVISE, examples=EXAMPLES)
