"""Planners side by side, in one run: quality, moves, and CPU time as a ratio to greedy.

    python benchmarks/placement.py                  all shapes, 32 to 576 ranks: some minutes
    python benchmarks/placement.py --seeds 3 14 15  the loads of these seeds, to see them again
    python benchmarks/placement.py --shapes a e     these only; nothing is kept
    python benchmarks/placement.py --quick          one seed, few repeats; nothing is kept

Loads are those of `lib/loads.py`, of seeds drawn anew each time: twelve windows, of which every
fourth brings another domain. A plan is made on one window and judged on it (`plan`), on the next
one (`next`, in steady windows and where the domain switches), on batches of the next one with the
plan's shares (`iter`), and on the same batches with shares solved on their own counts (`exact`):
the optimum of the linear program, of rows that can be divided. Of `connected` it also says what the
engine makes of them (`routed`): so many sweeps of its kernel, and whole rows, 1,024 a rank. `moved`
is copies that their rank did not hold, as part of all slots. Times are CPU seconds of one thread,
medians of interleaved pairs over all seeds, as ratios to greedy: the faster of the fixed baseline
and the shipped one, whose plans are equal.
Beside it: how far shares are from the optimum of the linear program, and what moves when a load is
planned on twice.

Writes benchmarks/results/placement.json; `python benchmarks/report.py` shows it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from lib import rivals
from lib.greedy import Baseline
from lib.loads import Counts, Model, batches, windows
from lib.results import ROOT, Row, save
from report import show

from equipoise import _native
from equipoise.balancer.experts import Plan, plan
from equipoise.balancer.experts.placement import SHARE_ONE, Layout, Placement, even_shares

WINDOWS, BATCHES = 13, 2
"""Windows of a trial, and batches of each."""


@dataclass(frozen=True)
class Shape:
    """How many of everything, and the nodes and groups of the hierarchical rule."""

    layers: int
    experts: int
    slots: int
    ranks: int
    nodes: int
    groups: int

    @property
    def model(self) -> Model:
        """Loads of that shape."""
        return Model(layers=self.layers, experts=self.experts, ranks=self.ranks)


SHAPES = {
    "a": Shape(58, 256, 288, 32, 4, 8),
    "b": Shape(58, 256, 320, 64, 8, 8),
    "c": Shape(94, 128, 160, 32, 4, 8),
    "d": Shape(61, 384, 512, 128, 16, 16),
    "e": Shape(58, 256, 1152, 576, 72, 8),
}


@dataclass(frozen=True)
class Trial:
    """Windows, one after the other.

    Attributes:
        loads: (layers, experts) of each window.
        switched: whether its domain is another than in the window before.
        batches: batches of each window, (layers, experts).
    """

    loads: Sequence[Counts]
    switched: Sequence[bool]
    batches: Sequence[Sequence[Counts]]


def synthetic(shape: Shape, seed: int) -> Trial:
    """The calibrated loads of `loads.py`."""
    window_list = list(windows(shape.model, seed, WINDOWS))
    window_batches = [
        list(batches(shape.model, window.odds, seed * 100 + number - 1, BATCHES)) if number else []
        for number, window in enumerate(window_list)
    ]
    return Trial(
        [window.load for window in window_list],
        [window.switched for window in window_list],
        window_batches,
    )


MAX_RANKS = 128
"""Beyond so many, the swift-like rule takes minutes."""
Planner = Callable[[Counts, Layout | None], Layout]


def left_out(shape: Shape) -> frozenset[str]:
    """Rules that are left out on a shape: it would take them minutes, or has not their form."""
    divides = shape.slots % shape.nodes == 0 and shape.experts % shape.groups == 0
    rules = {"swift-like"} if shape.ranks > MAX_RANKS else set()
    if shape.groups < shape.nodes or not divides:
        rules.add("hierarchical")
    return frozenset(rules)


def planners(shape: Shape) -> dict[str, Planner]:
    """By name; each is given the load and what is installed."""
    slots, ranks = shape.slots, shape.ranks
    by_name: dict[str, Planner] = {
        "greedy": lambda load, _: _with_even_shares(shape, _native.plan_greedy(load, slots, ranks)),
        "snake": lambda load, _: _by_layer(
            shape, lambda row: rivals.snake(row, slots, ranks), load
        ),
        "swift-like": lambda load, installed: _swift(shape, load, installed),
        "connected": lambda load, _: _ours(shape, "connected", load, None),
        "incremental": lambda load, installed: _ours(shape, "incremental", load, installed),
        "hierarchical": lambda load, _: _by_layer(
            shape,
            lambda row: rivals.hierarchical(row, slots, ranks, shape.nodes, shape.groups),
            load,
        ),
    }
    return {name: by_name[name] for name in by_name if name not in left_out(shape)}


def _with_even_shares(shape: Shape, placement: Placement) -> Layout:
    return Layout(placement, even_shares(placement, shape.experts))


def _by_layer(shape: Shape, rule: Callable[[Counts], Placement], load: Counts) -> Layout:
    return _with_even_shares(shape, np.stack([rule(row) for row in load]))


def _ours(shape: Shape, policy: str, load: Counts, installed: Layout | None) -> Layout:
    before = None if installed is None else installed.placement
    new_plan = plan(load, slots=shape.slots, ranks=shape.ranks, installed=before, policy=policy)
    return Layout(new_plan.placement, new_plan.shares)


def _swift(shape: Shape, load: Counts, installed: Layout | None) -> Layout:
    if installed is None:
        return _with_even_shares(shape, _native.plan_greedy(load, shape.slots, shape.ranks))
    pairs = zip(load, installed.placement, strict=True)
    return _with_even_shares(
        shape,
        np.stack([rivals.swift(row, installed_row, shape.ranks) for row, installed_row in pairs]),
    )


def cpu(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def times(shape: Shape, trials: Sequence[Trial], repeats: int) -> dict[str, Any]:
    """Greedy's own milliseconds; of ours, by what is planned, seconds and ratios to greedy's, over
    all trials.

    Greedy is the faster of the fixed baseline and the shipped one, whose plans are equal; else
    `RuntimeError`.
    """
    baseline, ranks, slots = Baseline(), shape.ranks, shape.slots
    pairs: dict[str, list[tuple[float, float]]] = {}
    for trial in trials:
        first_load = trial.loads[0]
        shipped = _native.plan_greedy(first_load, slots, ranks)
        if not np.array_equal(baseline.plan(first_load, slots, ranks), shipped):
            raise RuntimeError("the shipped greedy plans otherwise than the baseline")

        def greedy(first_load: Counts = first_load) -> float:
            fixed = cpu(lambda: baseline.plan(first_load, slots, ranks))
            return min(fixed, cpu(lambda: _native.plan_greedy(first_load, slots, ranks)))

        for kind, call in _calls(shape, trial):
            pairs.setdefault(kind, []).extend((greedy(), cpu(call)) for _ in range(repeats))
    milliseconds = (
        statistics.median(pair[0] for times_of_kind in pairs.values() for pair in times_of_kind)
        * 1e3
    )
    summaries = {kind: _time_summary(times_of_kind) for kind, times_of_kind in pairs.items()}
    return {"greedy_milliseconds": milliseconds, **summaries}


def _time_summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [ours / greedy for greedy, ours in pairs]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "seconds": statistics.median(ours for _, ours in pairs),
        "seconds_highest": max(ours for _, ours in pairs),
    }


def _calls(shape: Shape, trial: Trial) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """What is timed: one connected plan, and every rebalance of an incremental run."""
    slots, ranks = shape.slots, shape.ranks

    def anew() -> Plan:
        return plan(trial.loads[0], slots=slots, ranks=ranks, policy="connected")

    yield "connected", anew
    installed = anew()

    def again() -> Plan:
        placement = installed.placement
        return plan(
            trial.loads[1], slots=slots, ranks=ranks, policy="connected", installed=placement
        )

    yield "connected_installed", again
    for load, switched in zip(trial.loads[1:-1], trial.switched[1:-1], strict=True):

        def call(load: Counts = load, before: Placement = installed.placement) -> Plan:
            return plan(load, slots=slots, ranks=ranks, installed=before)

        yield ("switch" if switched else "steady"), call
        installed = call()


sys.path.insert(0, str(ROOT / "tests"))
SEEDS, REPEATS = 3, 5
PROVED_PLANS = 3
"""Rebalances of a trial whose shares are held to the linear program."""
TARGET = 0.02
Floats = npt.NDArray[np.float64]
Figures = dict[str, Any]
SHOWN_COLUMNS = (
    "plan",
    "worst",
    "next",
    "next_at_switch",
    "iter",
    "exact",
    "moved_steady",
    "moved_switch",
)
"""What of a planner's summary is kept."""


def imbalance(load: Counts, layout: Layout, ranks: int) -> Floats:
    """(layers,): max/mean - 1; 0 of a layer without load."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1) * layout.shares
    rank_rows = rows.reshape(load.shape[0], ranks, -1).sum(axis=2)
    mean = rank_rows.mean(axis=1)
    excess: Floats = np.where(
        mean > 0, rank_rows.max(axis=1) / np.where(mean > 0, mean, 1.0) - 1.0, 0.0
    )
    return excess


def with_solved_shares(load: Counts, layout: Layout, ranks: int) -> Layout:
    """The same placement with shares solved on that load."""
    placement = layout.placement
    new_plan = plan(load, slots=placement.shape[1], ranks=ranks, installed=placement, max_copies=0)
    return Layout(new_plan.placement, new_plan.shares)


def routed_imbalance(load: Counts, layout: Layout, ranks: int) -> Floats:
    """(layers,): the imbalance of a batch as the engine routes it with exact shares, in whole rows.

    All ranks divide their rows as one batch, so it does not matter which rank has which.
    """
    experts = load.shape[1]
    imbalances = np.empty(load.shape[0])
    for layer, (counts, placement) in enumerate(zip(load, layout.placement, strict=True)):
        slots = placement.size
        start, replicas, sums = (np.empty(n, np.int32) for n in (experts + 1, slots, slots))
        even_split = even_shares(placement[None], experts)[0]
        _native.build_table(placement, even_split, experts, start, replicas, sums)
        rows = np.repeat(np.arange(experts, dtype=np.int32), counts)
        slot_ids, row_counts = np.empty_like(rows), np.empty(experts, np.int32)
        total, before = counts.astype(np.int32), np.zeros(experts, np.int32)
        batch = rows, start, replicas, ranks, 0, layer, slot_ids, row_counts
        _native.route_levelled(*batch, total, before)
        slot_rows = np.bincount(slot_ids, minlength=slots)
        by_rank = slot_rows.reshape(ranks, -1).sum(axis=1)
        imbalances[layer] = by_rank.max() / by_rank.mean() - 1
    return imbalances


def as_routed(shape: Shape, trials: Sequence[Trial]) -> float | None:
    """Mean over batches of a domain that stays; None where so many ranks would take minutes."""
    if shape.ranks > MAX_RANKS:
        return None
    imbalances = []
    for trial in trials:
        for at in range(1, len(trial.loads) - 1):
            if trial.switched[at + 1]:
                continue
            layout = _ours(shape, "connected", trial.loads[at], None)
            for batch in trial.batches[at + 1]:
                imbalances.append(routed_imbalance(batch, layout, shape.ranks).mean())
    return float(np.mean(imbalances))


def judge(planner: Planner, trial: Trial, ranks: int) -> list[Row]:
    """One row for each plan; the first one finds nothing installed, and `moved` says 1."""
    installed, rows = None, []
    for number in range(len(trial.loads) - 1):
        load, after, next_batches = (
            trial.loads[number],
            trial.loads[number + 1],
            trial.batches[number + 1],
        )
        proposed = planner(load, installed)
        before = None if installed is None else installed.placement
        moved_slots = proposed.placement.size
        if before is not None:
            moved_slots = _native.count_moves(before, proposed.placement, ranks)
        plan_imbalance = imbalance(load, proposed, ranks)
        exact = [
            imbalance(b, with_solved_shares(b, proposed, ranks), ranks).mean() for b in next_batches
        ]
        rows.append({
            "switched": float(trial.switched[number]),
            "ends": float(trial.switched[number + 1]),
            "moved": moved_slots / proposed.placement.size,
            "plan": float(plan_imbalance.mean()),
            "worst": float(plan_imbalance.max()),
            "next": float(imbalance(after, proposed, ranks).mean()),
            "iter": float(np.mean([imbalance(b, proposed, ranks) for b in next_batches])),
            "exact": float(np.mean(exact)),
        })  # fmt: skip
        installed = proposed
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """Means, of steady rebalances and of those on the first window of a domain, where there are."""

    def steady(row: Row) -> bool:
        return not row["switched"]

    def stays(row: Row) -> bool:
        return not row["ends"]

    criteria: dict[str, tuple[str, Callable[[Row], bool]]] = {
        "plan": ("plan", lambda _: True),
        "next": ("next", lambda row: stays(row) and steady(row)),
        "next_after_switch": ("next", lambda row: bool(row["switched"])),
        "next_at_switch": ("next", lambda row: bool(row["ends"])),
        "next_stays": ("next", stays),
        "iter": ("iter", stays),
        "exact": ("exact", stays),
        "moved_steady": ("moved", steady),
        "moved_switch": ("moved", lambda row: bool(row["switched"])),
        "plan_switch": ("plan", lambda row: bool(row["switched"])),
    }
    means = {
        "worst": max(row["worst"] for row in rows),
        "plan_highest": max(row["plan"] for row in rows),
        "moved_most": max(row["moved"] for row in rows),
    }
    for name, (key, which) in criteria.items():
        values = [row[key] for row in rows if which(row)]
        if values:
            means[name] = statistics.fmean(values)
    return means


def chain(shape: Shape, trial: Trial) -> Iterator[tuple[Counts, Plan]]:
    """Loads and the plans of an incremental run on them."""
    installed = None
    for load in trial.loads[:-1]:
        new_plan = plan(load, slots=shape.slots, ranks=shape.ranks, installed=installed)
        yield load, new_plan
        installed = new_plan.placement


def unchanged(shape: Shape, trials: Sequence[Trial]) -> dict[str, int]:
    """What moves when the same load is planned on again, where the target holds and where not."""
    counts = {"plans": 0, "held": 0, "moved_held": 0, "moved": 0}
    for trial in trials:
        for load, first_plan in chain(shape, trial):
            again = plan(load, slots=shape.slots, ranks=shape.ranks, installed=first_plan.placement)
            on_target = first_plan.predicted_imbalance <= TARGET
            counts["plans"] += 1
            counts["held"] += on_target
            counts["moved_held"] = max(counts["moved_held"], again.moves if on_target else 0)
            counts["moved"] = max(counts["moved"], again.moves)
    return counts


def gaps(shape: Shape, trial: Trial) -> dict[str, float]:
    """By how much shares miss the optimum that HiGHS finds: the largest over layers."""
    from helpers.references.linear_program import optima

    def gap(load: Counts, layout: Layout) -> float:
        missed = imbalance(load, layout, shape.ranks) - optima(load, layout.placement, shape.ranks)
        return float(missed.max())

    largest_gaps = {"connected": 0.0, "connected, batches": 0.0, "incremental": 0.0}
    plans = list(chain(shape, trial))
    for number in np.unique(np.linspace(0, len(plans) - 1, PROVED_PLANS).astype(int)):
        load, incremental_plan = plans[number]
        connected_plan = plan(load, slots=shape.slots, ranks=shape.ranks, policy="connected")
        layout, batch = (
            Layout(connected_plan.placement, connected_plan.shares),
            trial.batches[number + 1][0],
        )
        own = with_solved_shares(batch, layout, shape.ranks)
        later = Layout(incremental_plan.placement, incremental_plan.shares)
        candidates = zip(largest_gaps, ((load, layout), (batch, own), (load, later)), strict=True)
        for name, (rows, candidate) in candidates:
            largest_gaps[name] = max(largest_gaps[name], gap(rows, candidate))
    return largest_gaps


def step(shape: Shape, trial: Trial) -> float:
    """What the least change of a share is worth on a rank, the most over layers, in means.

    Shares are whole numbers of 1 / 65536: nobody can come nearer to an optimum than about that.
    """
    parts = [load.max(axis=1) / np.maximum(load.sum(axis=1), 1) for load in trial.loads]
    return float(np.max(parts)) * shape.ranks / SHARE_ONE


def measure(name: str, shape: Shape, trials: Sequence[Trial], repeats: int) -> Figures:
    """One shape."""
    runs: dict[str, list[list[Row]]] = {}
    for algorithm, planner in planners(shape).items():
        sys.stderr.write(f"{name}: {algorithm}\n")
        runs[algorithm] = [judge(planner, trial, shape.ranks) for trial in trials]
    sys.stderr.write(f"{name}: times, linear programs\n")
    # Of the first plan nothing moves that was installed: it is in no mean.
    later = {
        key: [row for rows in rows_by_trial for row in rows[1:] or rows]
        for key, rows_by_trial in runs.items()
    }
    return {
        "shape": vars(shape),
        "times": times(shape, trials, repeats),
        "gaps": gaps(shape, trials[0]),
        "step": step(shape, trials[0]),
        "unchanged": unchanged(shape, trials),
        "routed": as_routed(shape, trials),
        "algorithms": {algorithm: summary(rows) for algorithm, rows in later.items()},
    }


def tables(by_shape: Figures) -> dict[str, list[Row]]:
    """Rows of all shapes."""
    table_rows: dict[str, list[Row]] = {"planners": [], "times": [], "shares": []}
    for each in by_shape.values():
        words = "{layers} layers x {experts} experts, {slots} slots, {ranks} ranks"
        shape = words.format(**each["shape"])
        for planner, row in each["algorithms"].items():
            shown_columns = {key: row[key] for key in SHOWN_COLUMNS if key in row}
            table_rows["planners"].append({"shape": shape, "planner": planner, **shown_columns})
        kinds = ("connected", "connected_installed", "steady", "switch")
        times_ = {kind: ratio(each, kind) for kind in kinds}
        greedy = each["times"]["greedy_milliseconds"]
        table_rows["times"].append({"shape": shape, **times_, "greedy_ms": greedy})
        gaps_ = dict(
            zip(("connected", "batches", "incremental"), each["gaps"].values(), strict=True)
        )
        table_rows["shares"].append(
            {"shape": shape, **gaps_, "step": each["step"], **each["unchanged"]}
        )
    return table_rows


def ratio(shape_figures: Figures, kind: str) -> list[float]:
    """Of times over greedy's, with its spread."""
    return [shape_figures["times"][kind][key] for key in ("ratio", "lowest", "highest")]


def figures(by_shape: Figures) -> Row:
    """What bars are about; all shapes have to be there."""
    a, b, d, e = (by_shape[name] for name in "abde")
    rows, greedy = a["algorithms"], a["algorithms"]["greedy"]
    slowest = {
        kind: e["times"][kind]["seconds_highest"]
        for kind in ("connected", "connected_installed", "steady", "switch")
    }
    gap, where = max(
        (gap, f"{each['shape']['ranks']} ranks, {kind}; 1/65536 of the hottest expert is "
         f"{each['step']:.5f} there")
        for each in by_shape.values() for kind, gap in each["gaps"].items()
    )  # fmt: skip

    def exact(each: Figures) -> Row:
        note = f"greedy's placement {each['algorithms']['greedy']['exact']:.4f}"
        return {"value": each["algorithms"]["connected"]["exact"], "note": note}

    return {
        "connected_plan": {
            "value": rows["connected"]["plan"],
            "note": f"worst layer {rows['connected']['worst']:.4f}",
        },
        **{f"{kind}_time": ratio(a, kind) for kind in ("connected", "steady", "switch")},
        "moved_again": max(each["unchanged"]["moved_held"] for each in by_shape.values()),
        "incremental_plan": rows["incremental"]["plan_highest"],
        "moved_steady": rows["incremental"]["moved_steady"],
        "moved_switch": {
            "value": rows["incremental"]["moved_switch"],
            "note": f"a single one at most {rows['incremental']['moved_most']:.2%}",
        },
        "next_above_greedy": rows["incremental"]["next_stays"] / greedy["next_stays"] - 1.0,
        **{f"exact_{each['shape']['ranks']}": exact(each) for each in (a, b, d)},
        **{f"routed_{each['shape']['ranks']}": each["routed"] for each in (a, b, d)},
        "seconds_576": slowest["connected"],
        "installed_seconds_576": slowest["connected_installed"],
        "incremental_seconds_576": max(slowest["steady"], slowest["switch"]),
        "shares_gap": {"value": gap, "note": where},
    }


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seeds", nargs="+", type=int, help=f"of loads; {SEEDS} drawn anew if not")
    parser.add_argument("--quick", action="store_true", help="one seed, few repeats, not kept")
    options = parser.parse_args()
    count, repeats = (1, 3) if options.quick else (SEEDS, REPEATS)
    # Drawn anew, so that nothing is tuned on them; below 10^6, since batches are of 100 seeds each.
    seeds = options.seeds or np.random.default_rng().integers(10**6, size=count).tolist()
    sys.stderr.write(f"--seeds {' '.join(map(str, seeds))}\n")
    by_shape = {
        name: measure(name, shape, [synthetic(shape, seed) for seed in seeds], repeats)
        for name, shape in SHAPES.items()
        if name in options.shapes
    }
    complete = list(by_shape) == list(SHAPES)
    bars = figures(by_shape) if complete else {}
    show("placement", bars, tables(by_shape))
    if complete and not options.quick:
        command = ["python", "benchmarks/placement.py", "--seeds", *map(str, seeds)]
        save("placement", command, bars, tables(by_shape))


if __name__ == "__main__":
    main()
