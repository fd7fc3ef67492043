"""`equipoise plan`: its options, its checks, and the run from statistics to a placement file."""

import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.balancer.experts.config import DEFAULT_SIGMA, MIN_SIGMA_WINDOWS, default_sigma
from equipoise.balancer.formats.format_names import PLACEMENT_FORMAT_NAMES
from equipoise.cli import kinds
from equipoise.cli.files import describe_path, ensure_folder, write_file
from equipoise.cli.kinds import resolve_numbers
from equipoise.cli.offline import (
    MAX_SLOTS,
    check_outputs,
    check_ranks,
    load_placement,
    load_statistics,
    print_written,
    request_values,
    usage_errors,
    warn,
    warn_of_dropped_layers,
)
from equipoise.cli.option import REQUIRED, Option
from equipoise.cli.option_checks import check_count
from equipoise.hal.errors import PlacementError, UsageError

SHAPE, AIM, SPARING, OUTPUT = "shape", "what to plan for", "what may move", "output"

OPTIONS = (
    Option(key="ranks", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed", help="ranks that serve"),
    Option(key="slots", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed",
           help="slots per layer over all ranks, a multiple of them"),
    Option(key="nodes", kind=kinds.WHOLE, group=SHAPE, metavar="N", shown_default="1",
           help="machines, of as many ranks each"),
    Option(key="policy", kind=kinds.POLICY, group=AIM, metavar="|".join(kinds.POLICIES),
           shown_default="incremental",
           help="greedy: the public rule; connected: so that shares can level any batch; "
           "incremental: from what is installed, moving as little as can be"),
    Option(key="objective", kind=kinds.OBJECTIVE, group=AIM, metavar="|".join(kinds.OBJECTIVES),
           shown_default="tokens",
           help="what is to be equal on all ranks: rows, or experts that have any in a batch, as "
           "decoding waits for where memory bounds it; windows of the statistics are batches then"),
    Option(key="capacities", kind=kinds.NUMBERS, group=AIM, metavar="X,X,...|FILE",
           shown_default="equal ones",
           help="how much each rank can take, in any unit, one number for each; greedy places as "
           "if they were equal"),
    Option(key="split", kind=kinds.SPLIT, group=AIM, metavar="|".join(kinds.SPLITS),
           shown_default="shares",
           help="how an expert's rows are divided among its replicas: by shares that level the "
           "ranks, or even for engines that know no shares"),
    Option(key="survive", kind=kinds.WHOLE, group=AIM, metavar="0|1|2", shown_default="0",
           help="what no expert may be lost with: 0 nothing, 1 any one rank, 2 any one node"),
    Option(key="sigma", kind=kinds.REAL, group=AIM, metavar="Z",
           shown_default=f"{DEFAULT_SIGMA:g} for tokens where STATS have {MIN_SIGMA_WINDOWS} or "
           "more windows, else 0",
           help="a rank counts with its mean load and so many standard deviations of it over the "
           "windows, so that experts that are busy together are kept apart; 0: with the sum alone, "
           "as greedy always does"),
    Option(key="threads", kind=kinds.WHOLE, group=AIM, metavar="N", shown_default="1",
           help="over layers; the plan is the same with any number"),
    Option(key="installed", kind=kinds.PATH, group=SPARING, metavar="FILE", shown_default="none",
           help="placement that runs now, in any format"),
    Option(key="target", kind=kinds.REAL, group=SPARING, metavar="X", shown_default="0.02",
           help="imbalance, max/mean - 1 of the ranks, that incremental is content with"),
    Option(key="slack", kind=kinds.REAL, group=SPARING, metavar="X", shown_default="0.1",
           help="room that incremental keeps on each rank for shares, as part of the mean"),
    Option(key="headroom", kind=kinds.WHOLE, group=SPARING, metavar="N", shown_default="0",
           help="swaps of two experts in each layer that incremental changes, so that shares have "
           "room to level single batches: 0 to 1000; equipoise run and the engines use 8"),
    Option(key="max_copies", kind=kinds.WHOLE, group=SPARING, metavar="N", shown_default="no limit",
           help="copies that may move, over all layers; needs --installed"),
    Option(key="byte_budget", kind=kinds.BYTES, group=SPARING, metavar="SIZE",
           shown_default="no limit",
           help="weights that may move, over all layers and ranks, such as 1.5GiB; needs "
           "--installed and --expert-bytes"),
    Option(key="expert_bytes", kind=kinds.BYTES, group=SPARING, metavar="SIZE",
           shown_default="unknown", help="weights of one expert in one layer, such as 44M"),
    Option(key="node_cost", kind=kinds.REAL, group=SPARING, metavar="X", shown_default="1",
           help="what a copy from another node costs incremental, in copies within one"),
    Option(key="out", short="-o", kind=kinds.PATH, group=OUTPUT, metavar="FILE",
           shown_default=REQUIRED, help="write the placement there"),
    Option(key="format", kind=kinds.NAME, group=OUTPUT, metavar="NAME",
           shown_default="as the suffix says, .json is equipoise",
           help=f"format of the placement: {', '.join(PLACEMENT_FORMAT_NAMES)}"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What one `equipoise plan` was asked for; `progress` is `shown` or `hidden`.

    `sigma` is None where it was not set: see `sigma_for`.
    """

    statistics: Path
    ranks: int | None = None
    slots: int | None = None
    nodes: int = 1
    policy: str = "incremental"
    objective: str = "tokens"
    capacities: tuple[float, ...] | Path | None = None
    split: str = "shares"
    survive: int = 0
    sigma: float | None = None
    installed: Path | None = None
    target: float = 0.02
    slack: float = 0.1
    headroom: int = 0
    max_copies: int | None = None
    byte_budget: int | None = None
    expert_bytes: int | None = None
    node_cost: float = 1.0
    threads: int = 1
    out: Path | None = None
    format: str | None = None
    json: Path | None = None
    progress: str = "shown"

    def sigma_for(self, windows: int) -> float:
        """What was asked for, or what suits so many windows of statistics."""
        if self.sigma is not None:
            return self.sigma
        return default_sigma(windows, self.policy, self.objective)


if TYPE_CHECKING:
    from equipoise.balancer.experts import Plan
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
    from equipoise.report.placement.forecast import Forecast

MAX_THREADS = 256
SURVIVE_NODE, LEAST_NODES = 2, 2


def plan(arguments: Namespace, command: str) -> int:
    """Read statistics, plan, write the placement, print what it brings; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.placement.forecast import render
    from equipoise.report.terminal import stdout_colour_mode

    request = request_of(vars(arguments))
    validate(request)
    all_statistics = load_statistics(request.statistics)
    statistics = all_statistics.without_empty_layers()
    if not all_statistics.empty_layers:
        warn_of_dropped_layers(request.statistics, statistics)
    installed = _load_installed(request, all_statistics)
    request = _with_capacities(request, installed)
    unused = _unused_options(request, statistics.windows)
    if "sigma" in unused:
        request = replace(request, sigma=0.0)
    forecast = _forecast(request, statistics, installed)
    for name, reason in unused.items():
        warn(f"--{name.replace('_', '-')} has no effect: {reason}")
    _write(request, forecast, command)
    print(render(forecast, stdout_colour_mode()), flush=True)
    return 0


def request_of(arguments: Mapping[str, Any]) -> PlanRequest:
    """What the command line asks for, its configuration file included."""
    return PlanRequest(**request_values(arguments, BY_KEY))


def validate(request: PlanRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    check_ranks(request.ranks)
    if request.slots is not None:
        check_count("--slots", request.slots, MAX_SLOTS)
    check_count("--threads", request.threads, MAX_THREADS)
    if request.survive == SURVIVE_NODE and request.nodes < LEAST_NODES:
        raise UsageError(
            f"--survive 2 needs --nodes {LEAST_NODES} or more, got {request.nodes}: "
            "on one node all copies are lost with it"
        )
    if request.byte_budget is not None and request.expert_bytes is None:
        raise UsageError("--byte-budget needs --expert-bytes: how many copies it pays for")
    if request.installed is None:
        for flag in ("ranks", "slots"):
            if getattr(request, flag) is None:
                raise UsageError(f"--{flag} is needed: there is no --installed to read it from")
        if request.max_copies is not None:
            raise UsageError("--max-copies needs --installed: without it every copy is new")
        if request.byte_budget is not None:
            raise UsageError("--byte-budget needs --installed: without it every copy is new")
    _check_files(request)


def _check_files(request: PlanRequest) -> None:
    from equipoise.balancer.formats import placement_format

    if request.out is None:
        raise UsageError("-o is needed: where to write the placement")
    # The installed placement may be overwritten: it has been read by then.
    check_outputs({"STATS": request.statistics}, {"-o": request.out, "--json": request.json})
    with usage_errors("-o"):
        placement_format(request.out, request.format)


def _unused_options(request: PlanRequest, windows: int) -> dict[str, str]:
    """Options that were given and that this plan does not look at, with the reason."""
    defaults, unused = PlanRequest(statistics=request.statistics), {}
    if request.policy != "incremental" or request.installed is None:
        for name in ("target", "slack", "headroom", "node_cost"):
            if getattr(request, name) != getattr(defaults, name):
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
    """The installed placement, its layers those of the statistics that have rows.

    Raises UsageError also where a layer of it has no rows: what is written would lack its map, and
    formats that go by place would give each later layer another's.
    """
    if request.installed is None:
        return None
    from equipoise.report.placement.spread import select_layers

    placement = load_placement("--installed", request.installed, request.ranks)
    if request.slots not in (None, placement.slots):
        raise UsageError(
            f"--installed: has {placement.slots} slots, and --slots is {request.slots}"
        )
    statistics = all_statistics.without_empty_layers()
    dropped = len(statistics.empty_layers)
    if dropped and len(placement.layers) == len(statistics.layers) + dropped:
        raise UsageError(
            f"--installed: {request.installed} has all {len(placement.layers)} layers of "
            f"{request.statistics}, of which {dropped} have no rows there: record for longer"
        )
    with usage_errors(f"--installed: {request.installed}"):
        return select_layers(placement, statistics)


def _with_capacities(request: PlanRequest, installed: "ExpertPlacement | None") -> PlanRequest:
    if installed is not None:
        request = replace(request, ranks=installed.ranks, slots=installed.slots)
    if request.capacities is None:
        return request
    assert request.ranks is not None
    if request.policy == "greedy":
        warn("--capacities: greedy places as if all ranks were equal; only shares heed them")
    capacities = resolve_numbers("--capacities", request.capacities, request.ranks)
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
    layout = ExpertPlacement(new_plan.placement, new_plan.shares, request.ranks, statistics.layers)
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
        if key not in BY_KEY:
            raise
        flag = f"{BY_KEY[key].name} {value}" if equals else BY_KEY[key].name
        raise PlacementError(f"{flag} {rest}") from error


def _write(request: PlanRequest, forecast: "Forecast", command: str) -> None:
    from equipoise.balancer.formats import write_placement

    assert request.out is not None
    lines = [f"placement: {describe_path(request.out)}"]
    ensure_folder(request.out.parent)
    loss = write_placement(request.out, forecast.layout, request.format)
    if loss:
        hint = "; --split even plans for engines without them" if "shares" in loss else ""
        warn(f"{request.out}: {loss}{hint}")
    if request.json is not None:
        about = {"command": command, "statistics": str(request.statistics), "lost": loss}
        text = json.dumps(about | forecast.to_json(), indent=2, allow_nan=False)
        place = write_file(request.json, text + "\n")
        lines.append(f"figures: {place}")
    print_written(request.progress, lines)
