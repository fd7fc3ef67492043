"""`equipoise replay`: its options, its checks, and the run from a trace to what each would gain."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from equipoise.balancer.formats.iterations import IterationRange
from equipoise.cli import kinds
from equipoise.cli.command import Command
from equipoise.cli.hardware_options import (
    DEFAULT_LINK,
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
    check_outputs,
    print_written,
    ranks_to_serve,
    usage_errors,
    warn_of_dropped_layers,
    write_figures,
    write_page,
)
from equipoise.cli.progress import part_progress_for
from equipoise.cli.trace_options import (
    TRACE,
    TraceRequest,
    open_trace,
    recorders_of,
    steps_of,
)
from equipoise.hal.errors import UsageError
from equipoise.option import OUTPUT, Argument, Option, choice

SHAPE, CADENCE = "what serves", "when they plan"
REPLAY = """\
Replay recorded routing under the balancers of engines and under ours, step by step:
imbalance, step time, weights moved, pauses, KV cache and throughput of each; and when
to leave balancing off. A model, not a measurement: the page Replay has its formulas."""
EXAMPLES = """\
examples:
  equipoise replay routed/ --ranks 8 --experts 128
  equipoise replay counts.npy --ranks 32 --slots 256,288,320 --engine sglang,equipoise \\
      --hardware h200 --hidden 7168 --intermediate 2048 --itl 50
  equipoise replay per_pass.pt --ranks 8 --expert-bytes 18MiB --memory 60GiB \\
      --kv-bytes-per-token 96KiB --html replay.html

exit code: 0 replayed, 2 bad input, 3 something could not be written"""
ENGINES = "vllm", "sglang", "vllm-ascend", "trtllm", "equipoise"
"""Spelt out: to import the balancers takes longer than to say what was mistyped."""
ENGINE_NAMES = kinds.separated(
    choice(ENGINES), f"names of {', '.join(ENGINES)}, with commas between", "NAME[,NAME...]"
)
MAX_WINDOW = 2**20


@dataclass(frozen=True, kw_only=True)
class ReplayRequest(HardwareRequest, TraceRequest):
    """What one `equipoise replay` was asked for."""

    # fmt: off
    trace: Annotated[Path, Argument("TRACE", "recorded routing, by token or by step: a file or a "
                                    "folder")]
    ranks: Annotated[int | None, Option(
        "ranks that serve", SHAPE, least=1, most=MAX_RANKS,
        default="those that recorded the counts")] = None
    slots: Annotated[tuple[int, ...], Option(
        "slots per layer over all ranks, multiples of them; each is replayed", SHAPE,
        kind=kinds.WHOLES, least=1, most=MAX_SLOTS, default="one redundant slot on each rank")] = ()
    nodes: Annotated[int, Option(
        "machines, of as many ranks each", SHAPE, least=1, most=MAX_RANKS)] = 1
    engine: Annotated[tuple[str, ...], Option(
        f"whose balancers: {', '.join(ENGINES)}", SHAPE, kind=ENGINE_NAMES, default="all"
    )] = ENGINES
    range: Annotated[IterationRange | None, Option(
        "only these steps; STOP itself is not one of them", TRACE, kind=kinds.RANGE, default="all"
    )] = None
    window_size: Annotated[int | None, Option(
        "steps of load that a plan is made from", CADENCE,
        least=1, most=MAX_WINDOW, metavar="STEPS", default="each one's own")] = None
    step_interval: Annotated[int | None, Option(
        "steps from one plan to the next", CADENCE,
        least=1, most=MAX_WINDOW, metavar="STEPS", default="each one's own")] = None
    json: Annotated[Path | None, Option("write the figures there, step by step", OUTPUT)] = None
    html: Annotated[Path | None, Option("write a page with pictures there", OUTPUT)] = None
    # fmt: on


if TYPE_CHECKING:
    from equipoise.report.replay.inputs import ReplayInputs
    from equipoise.report.replay.replay import Replay


def replay(request: ReplayRequest, command: str) -> int:
    """Read a trace, replay it, write the figures, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.replay.table import render
    from equipoise.report.terminal import stdout_colour_mode

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
    window, interval = request.window_size, request.step_interval
    if window is not None and interval is not None and window > interval:
        raise UsageError(f"--window-size {window} is longer than --step-interval {interval}")
    if request.memory_share is not None and request.kv_bytes_per_token is None:
        raise UsageError("--memory-share needs --kv-bytes-per-token")
    if request.memory_share is not None and request.memory is not None:
        raise UsageError("--memory, or --memory-share of the hardware's: they say the same, twice")
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
    from equipoise.balancer.formats import CountsTrace
    from equipoise.report.replay.inputs import ReplayInputs

    hardware = hardware_of(request, moves=True)
    trace = open_trace(request.trace, request)
    ranks = ranks_to_serve(request.ranks, request.trace, recorders_of(trace))
    if ranks % request.nodes:
        raise UsageError(f"--nodes {request.nodes} do not divide {ranks} ranks")
    source = steps_of(trace, request, ranks, request.range)
    if isinstance(trace, CountsTrace):
        warn_of_dropped_layers(request.trace, trace.empty_layers)
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

    def page() -> str:
        from equipoise.report.replay.html import render_html

        return render_html(result, about)

    lines = write_figures(request.json, about | to_json(result), indent=None)
    lines += write_page(request.html, page)
    print_written(request.progress, lines)


COMMAND = Command(ReplayRequest, replay, description=REPLAY, examples=EXAMPLES)
