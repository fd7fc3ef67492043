"""`equipoise replay`: its options, its checks, and the run from a trace to what each would gain."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.cli import kinds
from equipoise.cli.files import write_file
from equipoise.cli.hardware_options import (
    DEFAULT_LINK,
    MACHINE,
    MACHINE_OPTIONS,
    MEMORY_OPTIONS,
    MODEL_OPTIONS,
    HardwareRequest,
    check_hardware,
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
    print_written,
    request_values,
    usage_errors,
    warn,
)
from equipoise.cli.option import Option
from equipoise.cli.option_checks import check_count
from equipoise.cli.progress import part_progress_for
from equipoise.cli.trace_options import (
    TRACE,
    TRACE_OPTIONS,
    TraceRequest,
    check_trace,
    open_trace,
    steps_of,
)
from equipoise.hal.errors import UsageError

SHAPE, CADENCE, OUTPUT = "what serves", "when they plan", "output"

OPTIONS = (
    Option(key="ranks", kind=kinds.WHOLE, group=SHAPE, metavar="N", shown_default="required",
           help="ranks that serve"),
    Option(key="slots", kind=kinds.WHOLES, group=SHAPE, metavar="N[,N...]",
           shown_default="one redundant slot on each rank",
           help="slots per layer over all ranks, multiples of them; each is replayed"),
    Option(key="nodes", kind=kinds.WHOLE, group=SHAPE, metavar="N", shown_default="1",
           help="machines, of as many ranks each"),
    Option(key="engine", kind=kinds.ENGINE_NAMES, group=SHAPE, metavar="NAME[,NAME...]",
           shown_default="all", help=f"whose balancers: {', '.join(kinds.ENGINES)}"),
    *TRACE_OPTIONS,
    Option(key="range", kind=kinds.RANGE, group=TRACE, metavar="START-STOP",
           shown_default="all", help="only these steps; STOP itself is not one of them"),
    Option(key="window_size", kind=kinds.WHOLE, group=CADENCE, metavar="STEPS",
           shown_default="each one's own", help="steps of load that a plan is made from"),
    Option(key="step_interval", kind=kinds.WHOLE, group=CADENCE, metavar="STEPS",
           shown_default="each one's own", help="steps from one plan to the next"),
    *MODEL_OPTIONS,
    *MACHINE_OPTIONS,
    Option(key="itl", kind=kinds.REAL, group=MACHINE, metavar="MS", shown_default="unknown",
           help="a step without a balancer, in ms, as measured"),
    *MEMORY_OPTIONS,
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there, step by step"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write a page with pictures there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no progress and no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


if TYPE_CHECKING:
    from equipoise.balancer.formats.iterations import IterationRange
    from equipoise.report.replay.inputs import ReplayInputs
    from equipoise.report.replay.replay import Replay

MAX_WINDOW = 2**20


@dataclass(frozen=True, kw_only=True)
class ReplayRequest(HardwareRequest, TraceRequest):
    """What one `equipoise replay` was asked for; `progress` is `shown` or `hidden`."""

    trace: Path
    ranks: int | None = None
    slots: tuple[int, ...] = ()
    nodes: int = 1
    engine: tuple[str, ...] = kinds.ENGINES
    range: "IterationRange | None" = None
    window_size: int | None = None
    step_interval: int | None = None
    json: Path | None = None
    html: Path | None = None
    progress: str = "shown"


def replay(arguments: Namespace, command: str) -> int:
    """Read a trace, replay it, write the figures, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.replay.table import render
    from equipoise.report.terminal import stdout_colour_mode

    request = ReplayRequest(**request_values(vars(arguments), BY_KEY))
    _validate(request)
    result = _replay(request)
    try:
        # Before the table: a closed standard output must not cost the file.
        _write(request, result, command)
    finally:
        print(render(result, stdout_colour_mode()), flush=True)
    return 0


def _validate(request: ReplayRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    if request.ranks is None:
        raise UsageError("--ranks is needed: how many ranks serve")
    check_ranks(request.ranks)
    for flag, value, most in (
        ("--nodes", request.nodes, request.ranks),
        ("--window-size", request.window_size, MAX_WINDOW),
        ("--step-interval", request.step_interval, MAX_WINDOW),
        *(("--slots", slots, MAX_SLOTS) for slots in request.slots),
    ):
        if value is not None:
            check_count(flag, value, most)
    window, interval = request.window_size, request.step_interval
    if window is not None and interval is not None and window > interval:
        raise UsageError(f"--window-size {window} is longer than --step-interval {interval}")
    if request.memory_share is not None and request.kv_bytes_per_token is None:
        raise UsageError("--memory-share needs --kv-bytes-per-token")
    if request.memory_share is not None and request.memory is not None:
        raise UsageError("--memory, or --memory-share of the hardware's: they say the same, twice")
    if request.ranks % request.nodes:
        raise UsageError(f"--nodes {request.nodes} do not divide {request.ranks} ranks")
    check_trace(request)
    check_hardware(request)
    check_outputs({"TRACE": request.trace}, {"--json": request.json, "--html": request.html})


def _replay(request: ReplayRequest) -> "Replay":
    from equipoise.report.replay.replay import replay as play

    inputs = _inputs(request)
    parts = part_progress_for(request.progress, "replaying")
    total = "" if inputs.source.steps is None else f" of {inputs.source.steps:,}"
    try:
        with usage_errors():
            return play(inputs, lambda step: parts.start_part(f"step {step:,}{total}"))
    finally:
        parts.close()


def _inputs(request: ReplayRequest) -> "ReplayInputs":
    from equipoise.report.replay.inputs import ReplayInputs

    hardware = hardware_of(request, moves=True)
    ranks = request.ranks
    assert ranks is not None
    source = steps_of(open_trace(request.trace, request), request, ranks, request.range)
    inputs = ReplayInputs(
        source=source,
        ranks=ranks,
        slots=(),
        nodes=request.nodes,
        engines=request.engine,
        window=request.window_size,
        interval=request.step_interval,
        expert=expert_of(request),
        hardware=hardware,
        link=request.link or DEFAULT_LINK,
        step_seconds=None if request.itl is None else request.itl / 1e3,
        dead_zone=dead_zone_of(request),
        kv_cache=kv_cache_of(request, hardware),
        kv_usage=1.0 if request.kv_usage is None else request.kv_usage,
    )
    _check_room(inputs)
    most = source.experts * ranks
    slots = tuple(sorted(set(request.slots))) or (min(inputs.least_slots + ranks, most),)
    for one in slots:
        check_slots(one, source.experts, ranks)
    return replace(inputs, slots=slots)


def _check_room(inputs: "ReplayInputs") -> None:
    """Raises UsageError where not even the fewest slots leave any KV cache."""
    weights = inputs.weight_bytes(inputs.least_slots)
    if inputs.kv_cache is not None and weights is not None:
        with usage_errors():
            inputs.kv_cache.check_room(weights, "--memory")


def _write(request: ReplayRequest, result: "Replay", command: str) -> None:
    from equipoise.report.replay.json_output import to_json

    about = {"command": command, "trace": str(request.trace)}
    if request.json is not None:
        text = json.dumps(about | to_json(result), allow_nan=False)
        print_written(request.progress, [f"figures: {write_file(request.json, text)}"])
    if request.html is not None:
        from equipoise.report.replay.html import render_html
        from equipoise.report.svg import PlotsMissing

        try:
            place = write_file(request.html, render_html(result, about))
            print_written(request.progress, [f"page: {place}"])
        except PlotsMissing as missing:
            warn(f"no page: {missing}")
