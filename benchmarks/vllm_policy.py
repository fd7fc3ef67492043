"""Placement in vLLM: what policies move, how level the next window is, what a commit costs.

    python benchmarks/vllm_policy.py            a few minutes; needs vLLM
    python benchmarks/vllm_policy.py --quick    one seed, for a look; nothing is kept

Everything of vLLM's is called as it stands: `DefaultEplbPolicy`, `compute_logical_maps`,
`_commit_eplb_maps_for_layer`; our policy through the same interface; our engine by what it drafts.
All rivals get the same windows, each starting from vLLM's first map and then from what it had
installed itself. A plan made on one window is judged on the next: *balancedness* is the mean over
ranks by the largest, both summed over layers. *Moved* is what ranks have to fetch from others, as
part of all slots. The first plan leaves vLLM's first map, and is told apart from those that follow.

The commit of one layer's map takes turns with vLLM's, eight layers each, in processor time of one
thread; every slot of the layer changes. Of a turn the first layer counts by itself, *cold*: it
finds the caches full of the other's data, as after a forward. Ours is all that the host does:
tables and their digest, made during the forward pass, and at the boundary the launch of nine copies
of slots and of the tables' change. What the stream runs is apart, since here it is a thread.

Writes benchmarks/results/vllm_policy.json; `python benchmarks/report.py` shows it.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lib.loads import Counts, Model, windows
from lib.results import save, spread
from report import show
from torch import Tensor
from vllm.distributed.eplb.eplb_state import _commit_eplb_maps_for_layer, compute_logical_maps
from vllm.distributed.eplb.policy import AbstractEplbPolicy, DefaultEplbPolicy

from equipoise.balancer.experts.config import BalancerConfig, PlannerOptions, Split
from equipoise.balancer.experts.engine.serving_state import ServingState, SlotCopies
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Layout,
    Placement,
    even_shares,
    initial_placement,
    solve_shares,
)
from equipoise.balancer.experts.planning.rebalance_plan import RebalanceLimits, plan_rebalance
from equipoise.balancer.experts.routing.layer_update import LayerUpdate, layer_update
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role
from equipoise.integrations.vllm.eplb.policy import policy_class
from equipoise.integrations.vllm.settings import EplbPolicySettings

TOKENS = 1_000_000
SIGMA = 1.0


BIG = ExpertShape(layers=58, experts=256, slots=288, ranks=32)
DEADLINE = 20.0


@dataclass(frozen=True)
class Traffic:
    """What is compared.

    Attributes:
        name: in tables.
        shape: it is placed in.
        sigma: of the logarithm of an expert's popularity.
        drift: of it, from window to window.
        tokens: of a layer and window.
    """

    name: str
    shape: ExpertShape
    sigma: float = SIGMA
    drift: float = 0.0
    tokens: int = TOKENS


@dataclass(frozen=True)
class Window:
    """Load int64 (layers, experts), and whether the traffic is another than before."""

    load: Counts
    switched: bool = False


def sampled(traffic: Traffic, seed: int, count: int) -> Iterator[Window]:
    """Steady windows, or such with drift."""
    rng = np.random.default_rng(seed)
    shape = traffic.shape
    logarithm = traffic.sigma * rng.standard_normal((shape.layers, shape.experts))
    for _ in range(count):
        popularity = np.exp(logarithm)
        odds = popularity / popularity.sum(axis=1, keepdims=True)
        yield Window(np.stack([rng.multinomial(traffic.tokens, row) for row in odds]))
        logarithm = logarithm + traffic.drift * rng.standard_normal(logarithm.shape)


def generated(shape: ExpertShape, seed: int, count: int) -> Iterator[Window]:
    """Windows of the generator, fitted to published figures."""
    model = Model(layers=shape.layers, experts=shape.experts, ranks=shape.ranks)
    for window in windows(model, seed, count):
        yield Window(window.load, window.switched)


GROUPS, NODES = 8, 4
"""Of the stock policy where it ties groups of experts to nodes."""
Rival = Callable[[Counts, Layout, ExpertShape], Layout]
"""What it installs for a load, given what is installed."""
MIN_GAIN = BalancerConfig().min_gain_parts


def start(shape: ExpertShape) -> Layout:
    """vLLM's first map: experts in order, then the first ones again."""
    row = np.arange(shape.slots, dtype=np.int32) % shape.experts
    placement = np.tile(row, (shape.layers, 1))
    return Layout(placement, even_shares(placement, shape.experts))


@dataclass(frozen=True)
class CalledPolicy:
    """A policy, called as vLLM calls it.

    Attributes:
        policy: of vLLM, or ours.
        groups: of experts.
        nodes: of ranks.
    """

    policy: type[AbstractEplbPolicy]
    groups: int = 1
    nodes: int = 1

    def __call__(self, load: Counts, installed: Layout, shape: ExpertShape) -> Layout:
        """The map that it answers with; checked by the engine's own maps."""
        installed_map = torch.from_numpy(installed.placement.astype(np.int64))
        sizes = shape.slots, self.groups, self.nodes, shape.ranks
        answer = self.policy.rebalance_experts(torch.from_numpy(load), *sizes, installed_map)
        placement = answer.numpy().astype(np.int32)
        return Layout(placement, even_shares(placement, shape.experts))


def ours(**settings: float) -> CalledPolicy:
    """(a): our policy with these settings."""
    return CalledPolicy(policy_class(EplbPolicySettings(**settings)))


def engine(load: Counts, installed: Layout, shape: ExpertShape) -> Layout:
    """(b): what our engine drafts with default aims and staging for any layer."""
    limits = RebalanceLimits(
        MIN_GAIN, shape.slots_per_rank, PlannerOptions(), nodes=1, split=Split.BY_SHARES
    )
    return plan_rebalance(load[None], installed, shape, limits).layout


RIVALS: dict[str, Rival] = {
    "stock": CalledPolicy(DefaultEplbPolicy),
    "stock, 4 nodes": CalledPolicy(DefaultEplbPolicy, GROUPS, NODES),
    "(a) policy": ours(),
    "(b) engine": engine,
}
SHARED = ("(b) engine",)
"""Those that divide an expert by shares; the others evenly."""


def fetched(old: Placement, new: Placement, shape: ExpertShape) -> int:
    """Copies that ranks get from others: experts they have now and had not."""
    return int((_held_experts(new, shape) & ~_held_experts(old, shape)).sum())


def changed(old: Placement, new: Placement) -> int:
    """Layers of which a slot changed."""
    return int((old != new).any(axis=1).sum())


def balancedness(load: Counts, layout: Layout, shape: ExpertShape) -> float:
    """As vLLM's log has it: mean over ranks by the largest, both summed over layers."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    ranks = (rows * (layout.shares / SHARE_ONE)).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    return float(ranks.mean(axis=1).sum() / ranks.max(axis=1).sum())


def exact(load: Counts, layout: Layout, shape: ExpertShape) -> Layout:
    """With the shares that are best for this very load."""
    return Layout(layout.placement, solve_shares(load, layout.placement, shape))


def complete(layout: Layout, shape: ExpertShape) -> bool:
    """Whether vLLM's own maps find a slot for every expert."""
    _, copies = compute_logical_maps(
        torch.from_numpy(layout.placement.astype(np.int64)), shape.experts
    )
    return bool((copies > 0).all())


def timed_layout(call: Callable[[], Layout]) -> tuple[Layout, float]:
    """What it finds, and milliseconds of this thread's processor."""
    began = time.thread_time()
    layout = call()
    return layout, (time.thread_time() - began) * 1e3


def _held_experts(placement: Placement, shape: ExpertShape) -> npt.NDArray[np.bool_]:
    """(layers, ranks, experts)."""
    mask = np.zeros((shape.layers, shape.ranks, shape.experts), dtype=np.bool_)
    parts = placement.reshape(shape.layers, shape.ranks, -1).astype(np.int64)
    np.put_along_axis(mask, parts, True, axis=2)
    return mask


WIDE = 1024
"""Of vLLM's map of experts to slots."""
ROUNDS, TURNS, IN_A_ROW = 7, 3, 8
MICRO = 1e6
Times = dict[str, float]


def commits() -> dict[str, list[float]]:
    """Microseconds of parts, and ratios of the same round: median, least and most of rounds."""
    state, layouts = _state(), _layouts()
    accelerator = registry.accelerator("cpu").open(0)
    contents = torch.zeros((BIG.layers * BIG.slots_per_rank, 1), dtype=torch.uint8)
    slots = tuple((Segment("none", row),) for row in contents)
    store = accelerator.slot_store(SlotLayout(slots, BIG.slots_per_rank))
    installed = ServingState(accelerator, store, BIG, layouts[0])

    def theirs(layer: int) -> Times:
        row = layouts[layer % 2].placement[layer].astype(np.int64)
        return _theirs(state, torch.from_numpy(row), layer)

    def ours(layer: int) -> Times:
        return commit_parts(accelerator, installed, layouts[layer % 2], layer)

    rounds = [_round(number, theirs, ours) for number in range(ROUNDS)]
    accelerator.close()
    parts = {name: spread((each[name] for each in rounds), MICRO) for name in rounds[0]}
    ratios: dict[str, Callable[[Times], float]] = {
        "ratio": lambda t: t["stock"] / t["all"],
        "ratio_cold": lambda t: t["stock, cold"] / t["all, cold"],
        "ratio_with_stream": lambda t: t["stock"] / (t["all"] + t["stream"]),
        "ratio_of_boundary": lambda t: t["stock"] / t["host"],
    }
    return {**parts, **{name: spread(map(ratio, rounds)) for name, ratio in ratios.items()}}


def commit_parts(
    accelerator: Accelerator, installed: ServingState, layout: Layout, layer: int
) -> dict[str, float]:
    """Seconds of the parts of one commit."""
    updates: list[LayerUpdate] = []
    tables = _cpu(lambda: updates.append(layer_update(layout, BIG, [layer])))
    digest = _cpu(lambda: updates[0].digest)
    copies = _copies(layer)
    with _held_back(accelerator):
        launched = _cpu(lambda: installed.commit(updates[0], copies))
    return {
        "tables": tables,
        "digest": digest,
        "host": launched,
        "all": tables + digest + launched,
        "stream": max(_in_place(accelerator, installed, updates[0], copies) - launched, 0.0),
    }


def _copies(layer: int) -> SlotCopies:
    """All slots of the rank, each from staging of its own."""
    first_slot = layer * BIG.slots_per_rank
    return tuple((slot, first_slot + slot) for slot in range(BIG.slots_per_rank))


def _in_place(
    accelerator: Accelerator, installed: ServingState, change: LayerUpdate, copies: SlotCopies
) -> float:
    """Seconds of host and stream in one: in a program of its own stream everything runs at once."""
    durations: list[float] = []
    compute = accelerator.stream(Role.COMPUTE)
    compute.launch(lambda: durations.append(_cpu(lambda: installed.commit(change, copies))))
    compute.synchronize(DEADLINE)
    return durations[0]


@contextmanager
def _held_back(accelerator: Accelerator) -> Iterator[None]:
    """Keep the compute stream from running what is launched, so that it takes no time from us."""
    compute, go_on = accelerator.stream(Role.COMPUTE), threading.Event()
    compute.launch(lambda: go_on.wait(DEADLINE))
    try:
        yield
    finally:
        go_on.set()
        compute.synchronize(DEADLINE)


@contextmanager
def one_core() -> Iterator[None]:
    """All threads of this process on one core."""
    mine = os.sched_getaffinity(0)
    _keep_to({min(mine)})
    try:
        yield
    finally:
        _keep_to(mine)


def _keep_to(cores: set[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cores)


def _layouts() -> tuple[Layout, Layout]:
    """The start layout, and one in which every slot holds another expert."""
    placement = initial_placement(BIG)
    turned = np.roll(placement, BIG.slots_per_rank, axis=1)
    popularity = np.random.default_rng(0).lognormal(sigma=1.0, size=(BIG.layers, BIG.experts))
    load = (1000 * popularity).astype(np.int64)
    return (
        Layout(placement, even_shares(placement, BIG.experts)),
        Layout(turned, solve_shares(load, turned, BIG)),
    )


def _round(number: int, *rivals: Callable[[int], Times]) -> Times:
    """Medians of seconds, by part."""
    times: dict[str, list[float]] = {}
    with one_core():
        for turn in range(TURNS):
            for rival in rivals:
                for place in range(IN_A_ROW):
                    layer = (IN_A_ROW * (TURNS * number + turn) + place) % BIG.layers
                    for part, seconds in rival(layer).items():
                        times.setdefault(part if place else f"{part}, cold", []).append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


def _theirs(state: Any, row: Tensor, layer: int) -> dict[str, float]:
    """Seconds of the whole commit, and of the maps alone."""
    return {
        "stock": _cpu(lambda: _commit_eplb_maps_for_layer(state, row, layer)),
        "stock maps": _cpu(lambda: compute_logical_maps(row, BIG.experts)),
    }


def _state() -> Any:
    """What of `EplbModelState` a commit touches."""
    layers, experts = BIG.layers, BIG.experts
    return SimpleNamespace(
        physical_to_logical_map=torch.zeros(layers, BIG.slots, dtype=torch.int64),
        logical_to_physical_map=torch.full((layers, experts, WIDE), -1, dtype=torch.int64),
        logical_replica_count=torch.zeros(layers, experts, dtype=torch.int64),
    )


def _cpu(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


OTHER_SHAPES = (
    ExpertShape(layers=26, experts=64, slots=72, ranks=8),
    ExpertShape(layers=94, experts=128, slots=144, ranks=16),
    ExpertShape(layers=60, experts=384, slots=416, ranks=32),
)
DRIFT = 0.05
SEEDS, WINDOWS = 5, 9
STOCK, POLICY, ENGINE = "stock", "(a) policy", "(b) engine"
KINDS = "steady", "drift"
TARGETS, GAINS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05), (0.0, 0.005, 0.01, 0.02)
Row = dict[str, Any]


def main_shape(seeds: int) -> list[Row]:
    """Steady, with drift, and switching, at the size of DeepSeek-V3 on 32 ranks."""
    kinds = Traffic("steady", BIG), Traffic("drift of 5%", BIG, drift=DRIFT)
    rows = [
        traffic_row(kind.name, BIG, [list(sampled(kind, seed, WINDOWS)) for seed in range(seeds)])
        for kind in kinds
    ]
    runs = [list(generated(BIG, seed, 3 * WINDOWS // 2)) for seed in range(seeds)]
    return [*rows, traffic_row("generated", BIG, runs)]


def traffic_row(name: str, shape: ExpertShape, runs: Sequence[Sequence[Window]]) -> Row:
    """Every rival on the same windows."""
    rows = [row for window_list in runs for row in follow(window_list, shape, RIVALS)]
    rivals = {rival: summary(rows, rival) for rival in RIVALS}
    return {"name": name, "shape": vars(shape), "rivals": rivals}


def follow(
    window_list: Sequence[Window], shape: ExpertShape, rivals: Mapping[str, Rival]
) -> list[Row]:
    """A row for each rebalance: of each rival what it moved, and how level the next window is."""
    installed = {name: start(shape) for name in rivals}
    rows = []
    for number, (window, after) in enumerate(pairwise(window_list)):
        row: Row = {"first": number == 0, "switched": window.switched, "ends": after.switched}
        for name, rival in rivals.items():
            old_layout = installed[name]
            new_layout, milliseconds = timed_layout(lambda: rival(window.load, old_layout, shape))  # noqa: B023 - called here
            if not complete(new_layout, shape):
                raise RuntimeError(f"{name} leaves an expert without a slot")
            at_best = exact(after.load, new_layout, shape) if name in SHARED else new_layout
            row[name] = {
                "moved": fetched(old_layout.placement, new_layout.placement, shape)
                / new_layout.placement.size,
                "layers": changed(old_layout.placement, new_layout.placement),
                "plan": balancedness(window.load, new_layout, shape),
                "next": balancedness(after.load, new_layout, shape),
                "exact": balancedness(after.load, at_best, shape),
                "milliseconds": milliseconds,
            }
            installed[name] = new_layout
        rows.append(row)
    return rows


def summary(rows: Sequence[Row], name: str) -> Row:
    """What a rival did: at first, where the traffic stays, and where it switches."""
    steady = [row for row in rows if not row["first"] and not row["switched"]]
    lasting = [row for row in steady if not row["ends"]]
    switches = [row for row in rows if row["switched"]]
    rival_figures: Row = {
        "first": spread(row[name]["moved"] for row in rows if row["first"]),
        "moved": spread(row[name]["moved"] for row in steady),
        "layers": spread(row[name]["layers"] for row in steady),
        "milliseconds": spread(row[name]["milliseconds"] for row in steady),
        **{key: spread(row[name][key] for row in lasting) for key in ("plan", "next", "exact")},
    }
    if STOCK in rows[0]:
        rival_figures["of_stock"] = of_stock(lasting, name)
    if switches:
        rival_figures["switch"] = spread(row[name]["moved"] for row in switches)
    return rival_figures


def of_stock(rows: Iterable[Row], name: str) -> list[float]:
    """Balancedness of the next window as part of the stock policy's, on the same window."""
    return spread(row[name]["next"] / row[STOCK]["next"] for row in rows)


def elsewhere(seeds: int) -> list[Row]:
    """Other shapes, and more or less skew: stock and (a), steady and with drift."""
    rivals = {name: RIVALS[name] for name in (STOCK, POLICY)}
    places = [(shape, 1.0) for shape in OTHER_SHAPES] + [(BIG, 0.5), (BIG, 1.5), (BIG, 2.0)]
    rows = []
    for shape, sigma in places:
        row: Row = {"shape": vars(shape), "sigma": sigma}
        for name, drift in (("steady", 0.0), ("drift", DRIFT)):
            traffic = Traffic(name, shape, sigma, drift)
            runs = [list(sampled(traffic, seed, WINDOWS)) for seed in range(seeds)]
            rows_of_shape = [
                each for window_list in runs for each in follow(window_list, shape, rivals)
            ]
            row[name] = {rival: summary(rows_of_shape, rival) for rival in rivals}
        rows.append(row)
    return rows


def curve(seeds: int) -> list[Row]:
    """(a) with other targets and gains: what moving less costs in balance."""
    ways = {(target, 0.01): ours(target=target) for target in TARGETS}
    ways |= {(0.02, gain): ours(min_gain=gain) for gain in GAINS}
    rivals: dict[str, Rival] = {STOCK: RIVALS[STOCK]}
    rivals |= {f"{target:g} {gain:g}": way for (target, gain), way in ways.items()}
    by_traffic = {}
    for name, drift in (("steady", 0.0), ("drift", DRIFT)):
        runs = [list(sampled(Traffic(name, BIG, drift=drift), s, WINDOWS)) for s in range(seeds)]
        rows = [row for window_list in runs for row in follow(window_list, BIG, rivals)]
        by_traffic[name] = {way: summary(rows, way) for way in rivals}
    return [
        {
            "target": target,
            "gain": gain,
            **{name: rows[f"{target:g} {gain:g}"] for name, rows in by_traffic.items()},
        }
        for target, gain in sorted(ways)
    ]


PARTS = {
    "stock": "vLLM's `_commit_eplb_maps_for_layer`, on CPU tensors",
    "stock maps": "of it: `compute_logical_maps`",
    "stock, cold": "the same, cold",
    "all": "(b), all that the host does",
    "all, cold": "the same, cold",
    "tables": "of it: tables, during the forward pass",
    "digest": "of it: their digest, during the forward pass",
    "host": "of it: the thread that steps, at the boundary, nine slots' copies among it",
    "host, cold": "the same, cold",
    "stream": "not in it: what the stream runs, nine copies of a byte among it",
}
"""Of a commit, in words."""


def figures_of(measurements: Row) -> tuple[Row, dict[str, list[Row]]]:
    """Bars, and rows of all tables."""
    steady, commit = measurements["traffic"][0]["rivals"], measurements["commit"]
    figures = {
        "stock_moved": steady[STOCK]["moved"],
        "policy_moved": steady[POLICY]["moved"],
        "policy_of_stock": steady[POLICY]["of_stock"],
        "engine_moved": steady[ENGINE]["moved"],
        "commit": commit["ratio"],
        "commit_cold": commit["ratio_cold"],
        "commit_with_stream": commit["ratio_with_stream"],
        "commit_at_boundary": commit["ratio_of_boundary"],
    }
    words = "{layers} layers x {experts} experts, {slots} slots, {ranks} ranks"
    traffic = [
        {
            "traffic": f"{row['name'].capitalize()}, {words.format(**row['shape'])}",
            "placed_by": name,
            **rival,
            "plan": rival["plan"][0],
            "exact": rival["exact"][0] if name in SHARED else None,
        }
        for row in measurements["traffic"]
        for name, rival in row["rivals"].items()
    ]
    elsewhere_ = [
        {
            "shape": "{layers} x {experts}, {slots}, {ranks}".format(**row["shape"])
            + f"; {row['sigma']:g}",
            **{f"{kind}_stock": row[kind][STOCK]["moved"] for kind in KINDS},
            **{f"{kind}_moved": row[kind][POLICY]["moved"] for kind in KINDS},
            **{f"{kind}_of_stock": row[kind][POLICY]["of_stock"] for kind in KINDS},
        }
        for row in measurements["elsewhere"]
    ]
    settings = [
        {
            "target": row["target"],
            "gain": row["gain"],
            **{f"{kind}_moved": row[kind]["moved"] for kind in KINDS},
            **{f"{kind}_of_stock": row[kind]["of_stock"] for kind in KINDS},
        }
        for row in measurements["curve"]
    ]
    rows = [
        {"what": words_of_part, "microseconds": commit[name]}
        for name, words_of_part in PARTS.items()
    ]
    tables = {"traffic": traffic, "elsewhere": elsewhere_, "settings": settings, "commit": rows}
    return figures, tables


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is kept")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    seeds = 1 if quick else SEEDS
    figures, tables = figures_of({
        "traffic": main_shape(seeds),
        "elsewhere": [] if quick else elsewhere(seeds),
        "curve": [] if quick else curve(seeds),
        "commit": commits(),
    })  # fmt: skip
    show("vllm_policy", figures, tables)
    if not quick:
        save("vllm_policy", ["python", "benchmarks/vllm_policy.py"], figures, tables)


if __name__ == "__main__":
    main()
