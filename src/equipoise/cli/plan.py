"""`equipoise plan`: its options, its checks, and the run from statistics to a placement file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from equipoise.balancer.experts.config import (
    DEFAULT_SIGMA,
    MIN_SIGMA_WINDOWS,
    PLANNER_LIMITS,
    default_sigma,
)
from equipoise.balancer.formats.format_names import PLACEMENT_FORMAT_NAMES
from equipoise.byte_sizes import BYTES
from equipoise.cli import kinds
from equipoise.cli.command import Command, Settings
from equipoise.cli.files import describe_path, ensure_folder
from equipoise.cli.kinds import resolve_numbers
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
    warn,
    write_figures,
)
from equipoise.hal.errors import PlacementError, UsageError
from equipoise.option import OUTPUT, Option

SHAPE, AIM, SPARING = "shape", "what to plan for", "what may move"
PLAN = """\
Read how many rows every expert took, place the experts so that no rank has more
to do than others, and write the placement. STATS is a file or a folder, in any
format of the page Formats."""
EXAMPLES = """\
examples:
  equipoise plan recorded/ --ranks 32 --slots 288 -o placement.json
  equipoise plan counts.npz --installed placement.json -o next.json
  equipoise plan counts.csv --ranks 8 --slots 64 --split even -o plan.yaml

exit code: 0 written, 2 bad input, nothing was written, 3 it could not be written"""
MAX_THREADS = 256
SURVIVE_NODE, LEAST_NODES = 2, 2


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Settings):
    """What one `equipoise plan` was asked for.

    `sigma` is None where it was not set: see `sigma_for`.
    """

    # fmt: off
    statistics: Annotated[Path, STATISTICS]
    ranks: Annotated[int | None, Option(
        "ranks that serve", SHAPE, least=1, most=MAX_RANKS,
        default="those of --installed, or that recorded")] = None
    slots: Annotated[int | None, Option(
        "slots per layer over all ranks, a multiple of them", SHAPE,
        least=1, most=MAX_SLOTS, default="those of --installed")] = None
    nodes: Annotated[int, Option(
        "machines, of as many ranks each, for --survive and --node-cost; experts are not tied to "
        "them", SHAPE, least=1, most=MAX_RANKS)] = 1
    policy: Annotated[Literal["greedy", "connected", "incremental"], Option(
        "greedy: the public rule; connected: so that shares can level any batch; "
        "incremental: from what is installed, moving as little as can be", AIM)] = "incremental"
    objective: Annotated[Literal["tokens", "active_experts"], Option(
        "what is to be equal on all ranks: rows, or experts that have any in a batch, as "
        "decoding waits for where memory bounds it; windows of the statistics are batches then",
        AIM)] = "tokens"
    capacities: Annotated[tuple[float, ...] | Path | None, Option(
        "how much each rank can take, in any unit, one number for each; greedy places as if they "
        "were equal", AIM, kind=kinds.NUMBERS, default="equal ones")] = None
    split: Annotated[Literal["shares", "even"], Option(
        "how an expert's rows are divided among its replicas: by shares that level the ranks, or "
        "even for engines that know no shares", AIM)] = "shares"
    survive: Annotated[int, Option(
        "keep every expert if 1: any one rank is lost, 2: any one node is; 0: no demand", AIM,
        least=0, most=2, metavar="0|1|2")] = 0
    sigma: Annotated[float | None, Option(
        "a rank counts with its mean load and so many standard deviations of it over the windows, "
        "so that experts that are busy together are kept apart; 0: with the sum alone, as greedy "
        "always does", AIM, least=0, most=PLANNER_LIMITS["sigma"], metavar="Z",
        default=f"{DEFAULT_SIGMA:g} for tokens where STATS have {MIN_SIGMA_WINDOWS} or more "
        "windows, else 0")] = None
    threads: Annotated[int, Option(
        "over layers; the plan is the same with any number", AIM,
        least=1, most=MAX_THREADS, rare=True)] = 1
    installed: Annotated[Path | None, Option(
        "placement that runs now, in any format", SPARING)] = None
    max_copies: Annotated[int | None, Option(
        "copies that may move, over all layers", SPARING,
        needs=("installed", "without it every copy is new"), least=0, default="no limit")] = None
    byte_budget: Annotated[int | None, Option(
        "weights that may move, over all layers and ranks, such as 1.5GiB; from --installed",
        SPARING, kind=BYTES, needs=("expert_bytes", "how many copies it pays for"),
        default="no limit")] = None
    expert_bytes: Annotated[int | None, Option(
        "weights of one expert in one layer, such as 44M", SPARING,
        kind=BYTES, default="unknown")] = None
    target: Annotated[float, Option(
        "imbalance, max/mean - 1 of the ranks, that incremental is content with", SPARING,
        least=0, most=PLANNER_LIMITS["target"], rare=True)] = 0.02
    slack: Annotated[float, Option(
        "room that incremental keeps on each rank for shares, as part of the mean", SPARING,
        least=0, most=PLANNER_LIMITS["slack"], rare=True)] = 0.1
    headroom: Annotated[int, Option(
        "swaps of two experts in each layer that incremental changes, so that shares have room to "
        "level single batches; equipoise run and the engines use 8", SPARING,
        least=0, most=PLANNER_LIMITS["headroom"], rare=True)] = 0
    node_cost: Annotated[float, Option(
        "what a copy from another node costs incremental, in copies within one", SPARING,
        least=1, most=1000, rare=True)] = 1.0
    out: Annotated[Path, Option(
        "write the placement there", OUTPUT, short="-o",
        why_required="where to write the placement")]
    format: Annotated[str | None, Option(
        f"format of the placement: {', '.join(PLACEMENT_FORMAT_NAMES)}", OUTPUT,
        default="as the suffix says, .json is equipoise")] = None
    json: Annotated[Path | None, Option("write the figures there", OUTPUT)] = None
    # fmt: on

    def sigma_for(self, windows: int) -> float:
        """What was asked for, or what suits so many windows of statistics."""
        if self.sigma is not None:
            return self.sigma
        return default_sigma(windows, self.policy, self.objective)


if TYPE_CHECKING:
    from equipoise.balancer.experts import Plan
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
    from equipoise.report.placement.forecast import Forecast


def plan(request: PlanRequest, command: str) -> int:
    """Read statistics, plan, write the placement, print what it brings; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.placement.forecast import render
    from equipoise.report.terminal import stdout_colour_mode

    validate(request)
    all_statistics = load_statistics(request.statistics)
    statistics = drop_empty_layers(request.statistics, all_statistics)
    installed_file = _load_installed(request, all_statistics)
    installed = _select_layers(request, statistics, installed_file)
    request = _with_shape(request, statistics, installed)
    unused = _unused_options(request, statistics.windows)
    if "sigma" in unused:
        request = replace(request, sigma=0.0)
    forecast = _forecast(request, statistics, installed)
    for name, reason in unused.items():
        warn(f"--{name.replace('_', '-')} has no effect: {reason}")
    _write(request, forecast, _unplanned_layers(request, statistics, installed_file), command)
    print(render(forecast, stdout_colour_mode()), flush=True)
    return 0


def validate(request: PlanRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    if request.survive == SURVIVE_NODE and request.nodes < LEAST_NODES:
        raise UsageError(
            f"--survive 2 needs --nodes {LEAST_NODES} or more, got {request.nodes}: "
            "on one node all copies are lost with it"
        )
    if request.installed is None:
        if request.slots is None:
            raise UsageError(
                "--slots is needed, or --installed: `equipoise advise` says how many pay"
            )
        if request.byte_budget is not None:
            raise UsageError("--byte-budget needs --installed: without it every copy is new")
    _check_files(request)


def _check_files(request: PlanRequest) -> None:
    from equipoise.balancer.formats import placement_format

    # The installed placement may be overwritten: it has been read by then.
    check_outputs({"STATS": request.statistics}, {"-o": request.out, "--json": request.json})
    with usage_errors("-o"):
        placement_format(request.out, request.format)


def _unused_options(request: PlanRequest, windows: int) -> dict[str, str]:
    """Options that were given and that this plan does not look at, with the reason."""
    defaults, unused = PlanRequest(statistics=request.statistics, out=request.out), {}
    if request.policy != "incremental" or request.installed is None:
        # Even splits are planned towards the target, whether something is installed or not.
        evenly = request.policy == "incremental" and request.split == "even"
        for name in ("target", "slack", "headroom", "node_cost"):
            used = evenly and name == "target"
            if not used and getattr(request, name) != getattr(defaults, name):
                unused[name] = "only incremental from --installed looks at it"
    elif request.headroom and request.split == "even":
        unused["headroom"] = "an even split has no shares that need room"
    if request.sigma and request.policy == "greedy":
        unused["sigma"] = "greedy plans for the sum of all windows"
    elif request.sigma and windows == 1:
        unused["sigma"] = "one window has no deviations"
    return unused


def _load_installed(
    request: PlanRequest, all_statistics: "ExpertStatistics"
) -> "ExpertPlacement | None":
    """The installed placement, as its file has it.

    Raises UsageError also where its layers go by place and one of them has no rows: what is written
    would lack its map, and each later layer would get another's.
    """
    if request.installed is None:
        return None
    from equipoise.balancer.formats.statistics import LayerNumbering

    placement = load_placement("--installed", request.installed, request.ranks)
    if request.slots not in (None, placement.slots):
        raise UsageError(
            f"--installed: has {placement.slots} slots, and --slots is {request.slots}"
        )
    statistics = all_statistics.without_empty_layers()
    dropped = len(statistics.empty_layers)
    by_place = placement.numbering is LayerNumbering.UNKNOWN
    if by_place and dropped and len(placement.layers) == len(statistics.layers) + dropped:
        raise UsageError(
            f"--installed: {request.installed} has all {len(placement.layers)} layers of "
            f"{request.statistics}, of which {dropped} have no rows there: record for longer"
        )
    return placement


def _select_layers(
    request: PlanRequest, statistics: "ExpertStatistics", placement: "ExpertPlacement | None"
) -> "ExpertPlacement | None":
    """The installed placement of the layers to plan."""
    if placement is None:
        return None
    from equipoise.report.placement.spread import select_layers

    with usage_errors(f"--installed: {request.installed}"):
        return select_layers(placement, statistics)


def _unplanned_layers(
    request: PlanRequest, statistics: "ExpertStatistics", placement: "ExpertPlacement | None"
) -> "ExpertPlacement | None":
    """Installed layers without rows, which are written as they are; None if there are none.

    A short recording may have no rows of a layer with experts. SGLang's file lists dense layers
    too, which belong into that format only.
    """
    from equipoise.balancer.formats import placement_format
    from equipoise.balancer.formats.statistics import LayerNumbering

    if placement is None or placement.numbering is LayerNumbering.UNKNOWN:
        return None
    form = placement_format(request.out, request.format).name
    if placement.numbering is LayerNumbering.EVERY_LAYER and form != "sglang":
        return None
    rows = [n for n, layer in enumerate(placement.layers) if layer in statistics.empty_layers]
    if not rows:
        return None
    return replace(
        placement,
        placement=placement.placement[rows],
        shares=placement.shares[rows],
        layers=tuple(placement.layers[row] for row in rows),
    )


def _with_shape(
    request: PlanRequest, statistics: "ExpertStatistics", installed: "ExpertPlacement | None"
) -> PlanRequest:
    """The request with ranks, slots and capacities as the files have them."""
    if installed is not None:
        request = replace(request, ranks=installed.ranks, slots=installed.slots)
    ranks = ranks_to_serve(request.ranks, request.statistics, statistics.recorders)
    request = replace(request, ranks=ranks)
    if request.capacities is None:
        return request
    if request.policy == "greedy":
        warn("--capacities: greedy places as if all ranks were equal; only shares heed them")
    capacities = resolve_numbers("--capacities", request.capacities, ranks)
    return replace(request, capacities=capacities)


def _forecast(
    request: PlanRequest, statistics: "ExpertStatistics", installed: "ExpertPlacement | None"
) -> "Forecast":
    from equipoise.balancer.formats import ExpertPlacement
    from equipoise.report.placement.forecast import Baseline, ForecastOptions, forecast

    assert request.ranks is not None
    began = time.perf_counter()
    new_plan = _make_plan(request, statistics, installed)
    seconds = time.perf_counter() - began
    layout = ExpertPlacement(
        new_plan.placement,
        new_plan.shares,
        request.ranks,
        statistics.layers,
        numbering=statistics.numbering,
    )
    return forecast(
        statistics,
        layout,
        Baseline.of(statistics, installed, request.ranks),
        ForecastOptions(
            policy=request.policy,
            objective=request.objective,
            capacities=_capacities(request),
            expert_bytes=request.expert_bytes,
            sigma=request.sigma_for(statistics.windows),
        ),
        moves=new_plan.moves,
        layer_moves=new_plan.layer_moves,
        seconds=seconds,
    )


def _capacities(request: PlanRequest) -> tuple[float, ...] | None:
    """Of the ranks; the file of them has been read."""
    assert not isinstance(request.capacities, Path)
    return request.capacities


def _make_plan(
    request: PlanRequest, statistics: "ExpertStatistics", installed: "ExpertPlacement | None"
) -> "Plan":
    from equipoise.balancer.experts.planning import planner

    assert request.ranks is not None
    assert request.slots is not None
    with usage_errors(), _by_option():
        return planner.plan(
            statistics.counts,
            slots=request.slots,
            ranks=request.ranks,
            nodes=request.nodes,
            installed=None if installed is None else installed.placement,
            policy=request.policy,
            target=request.target,
            slack=request.slack,
            headroom=request.headroom,
            max_copies=request.max_copies,
            byte_budget=request.byte_budget,
            # Alone it only says what the moves weigh.
            expert_bytes=None if request.byte_budget is None else request.expert_bytes,
            objective=request.objective,
            capacities=_capacities(request),
            node_cost=request.node_cost,
            survive=request.survive,
            sigma=request.sigma_for(statistics.windows),
            threads=request.threads,
            split=request.split,
        )


@contextmanager
def _by_option() -> Iterator[None]:
    """Errors of the planner about an argument name the option: `--sigma` for `sigma`."""
    try:
        yield
    except PlacementError as error:
        name, _, rest = str(error).partition(" ")
        key, equals, value = name.partition("=")
        if key not in COMMAND.options:
            raise
        flag = COMMAND.options[key].name + (f" {value}" if equals else "")
        raise PlacementError(f"{flag} {rest}") from error


REMEDIES = {
    "shares": "--split even plans for engines without them",
    "right only where every layer": "else plan counts with rows of zeros for dense layers",
}
"""What helps, by words in what a format loses."""


def _with_remedy(loss: str) -> str:
    remedy = next((text for words, text in REMEDIES.items() if words in loss), None)
    return loss if remedy is None else f"{loss} ({remedy})"


def _write(
    request: PlanRequest, forecast: "Forecast", unplanned: "ExpertPlacement | None", command: str
) -> None:
    from equipoise.balancer.experts.placement import format_ranges
    from equipoise.balancer.formats import write_placement

    lines = [f"placement: {describe_path(request.out)}"]
    layout = forecast.layout
    if unplanned is not None:
        layout = layout.with_layers_of(unplanned)
        lines[0] += f", layers {format_ranges(list(unplanned.layers))} as installed"
    ensure_folder(request.out.parent)
    loss = write_placement(request.out, layout, request.format)
    if loss:
        warn(f"{request.out}: {'; '.join(map(_with_remedy, loss.split('; ')))}")
    about = {"command": command, "statistics": str(request.statistics), "lost": loss}
    figures = about | forecast.to_json() | {"digest": layout.digest}
    lines += write_figures(request.json, figures)
    print_written(request.progress, lines)


COMMAND = Command(PlanRequest, plan, description=PLAN, examples=EXAMPLES)
