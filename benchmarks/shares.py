"""How level each share mode divides a batch, as the native kernels route it.

    python benchmarks/shares.py             all shapes, the generator, recorded routing, planners
    python benchmarks/shares.py --bound     how level any rule without communication can be
    python benchmarks/shares.py --speed     what `local` costs on the processor
    python benchmarks/shares.py --exchange  what gathered counts save an exchange, over gloo
    python benchmarks/shares.py --quick     a little of each; nothing is kept

Imbalance is max/mean - 1 of the rows that ranks get from all source ranks in a layer of a batch:
whole rows, counted from the slots that the kernels return. All modes see the same rows. `lagged`
solves shares by the engine's own rule from sub-windows of two steps.

*Multinomial*: every source rank draws tokens x 8 rows from the popularity of its layer, lognormal
with sigma 1.05; the placement is `connected`, planned on 1,024 tokens of every rank.
*Calibrated*: `lib/loads.py`; planned on one window, batches of the next one of the same domain,
whose rows are dealt to the ranks at random. *Recorded*: `equipoise record` serves the shipped model
on 8 ranks, and each rank's rows are of its own requests; on 4 ranks every rank has those of two.
Planned on 16 steps, judged on the 16 behind them, of the same kind of text or of another.
*Placements*: what shares make of other planning rules' placements, planned on the first window of
another calibrated domain and served in the second.

Writes benchmarks/results/shares.json, shares_bound.json, shares_speed.json or
shares_exchange.json; `python benchmarks/report.py` shows them.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lib.loads import Model, batches, windows
from lib.processes import Place, serve_on_ranks
from lib.results import Row, save, spread
from lib.share_routing import (
    SUB_WINDOW,
    Batch,
    Counts,
    Floats,
    Table,
    Trial,
    batch_of,
    local,
    node,
    routed,
)
from lib.team_bound import Bound, root_mean_square, team_bound
from report import show

from equipoise import _native
from equipoise.balancer.experts import Plan, plan
from equipoise.balancer.experts.placement import ExpertShape, Layout, Placement, solve_shares
from equipoise.balancer.formats import read_statistics
from equipoise.balancer.requests.policy_comparison import interval
from equipoise.hal import registry

TOP_K, SIGMA, PLANNED_TOKENS = 8, 1.05, 1024
MODES = "static", "lagged", "local", "node_4", "node_8", "exact"
SHAPES = (256, 288, 32), (256, 320, 32), (256, 320, 64), (384, 512, 128)
"""Experts, slots and ranks."""
MAIN, DOUBLE, LARGE = SHAPES[0], SHAPES[1], SHAPES[3]
BEFORE = 32
"""Steps of the same traffic that lagged shares know."""
RECORDED = (4, 36), (4, 40), (8, 40), (8, 48)
"""Ranks and slots for 32 experts: one or two slots a rank more than experts."""
RECORDED_MODES = "static", "lagged", "local", "exact"
SINCE = {"1": (0, 1), "2": (1, 2), "3 and 4": (2, 4), "5 to 8": (4, 8), "9 to 16": (8, 16)}
"""Steps since a switch."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        layers: of a shape, and of the generator; a quarter of them for a bound.
        steps: batches of each layer.
        tokens: of a rank and batch.
        seeds: of the generator, and of recordings.
        window: steps of a recorded window.
        phase: steps of a kind of text.
        samples: sources by which a bound is found; twice as many ranks judge it.
        pairs: timed pairs.
    """

    layers: int = 48
    steps: int = 20
    tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    seeds: int = 2
    window: int = 16
    phase: int = 40
    samples: int = 4096
    pairs: int = 41


QUICK = Size(8, 4, (64,), 1, 4, 8, 256, 1)


def shape_name(experts: int, slots: int, ranks: int) -> str:
    """In words."""
    return f"{experts} experts, {slots} slots, {ranks} ranks"


def popularity(layers: int, experts: int, generator: np.random.Generator) -> Floats:
    """(layers, experts): lognormal, sums to 1."""
    odds = np.exp(SIGMA * generator.standard_normal((layers, experts)))
    scaled: Floats = odds / odds.sum(axis=1, keepdims=True)
    return scaled


def layout_of(planned: Plan) -> Layout:
    """Its placement and shares."""
    return Layout(planned.placement, planned.shares)


def over_layers(imbalance: Floats) -> list[float]:
    """[mean, half width of its 95 % confidence interval] of (steps, layers): layers are drawn."""
    found = interval(imbalance.mean(axis=0).tolist())
    return [found.mean, found.half]


def multinomial(size: Size, shapes: Sequence[tuple[int, int, int]]) -> list[Row]:
    """One row for each shape and number of tokens."""
    rows = []
    for experts, slots, ranks in shapes:
        generator = np.random.default_rng(experts + slots + ranks)
        odds = popularity(size.layers, experts, generator)
        load = generator.multinomial(PLANNED_TOKENS * TOP_K * ranks, odds)
        layout = layout_of(plan(load, slots=slots, ranks=ranks, policy="connected"))
        for tokens in size.tokens:
            served = tokens * TOP_K
            trial = Trial(
                layout,
                ExpertShape(size.layers, experts, slots, ranks),
                steps=[
                    generator.multinomial(served, odds[:, None], size=(size.layers, ranks))
                    for _ in range(size.steps)
                ],
                before=list(generator.multinomial(served * ranks, odds, (BEFORE, size.layers))),
                planned=max(PLANNED_TOKENS // (tokens * SUB_WINDOW), 1),
            )
            figures = routed(trial, MODES)
            rows.append({
                "shape": shape_name(experts, slots, ranks),
                "tokens": tokens,
                **{mode: over_layers(figures[mode]) for mode in MODES},
            })  # fmt: skip
            sys.stderr.write(f"{rows[-1]['shape']}, {tokens} tokens\n")
    return rows


def split_by_rank(batch: Counts, ranks: int, generator: np.random.Generator) -> Counts:
    """(layers, ranks, experts): rows of (layers, experts), each rank's part as large."""
    layers, experts = batch.shape
    counts = np.empty((layers, ranks, experts), np.int64)
    for layer, row in enumerate(batch):
        ids = generator.permutation(np.repeat(np.arange(experts), row)).reshape(ranks, -1)
        places = ids + experts * np.arange(ranks)[:, None]
        counts[layer] = np.bincount(places.ravel(), minlength=ranks * experts).reshape(ranks, -1)
    return counts


def calibrated(size: Size) -> list[Row]:
    """One row for each number of slots, 128 tokens a rank."""
    rows = []
    for experts, slots, ranks in (MAIN, DOUBLE):
        model = Model(layers=size.layers, experts=experts, ranks=ranks)
        found: list[dict[str, Floats]] = []
        for seed in range(size.seeds):
            first, second = windows(model, seed, 2)
            trial = Trial(
                layout_of(plan(first.load, slots=slots, ranks=ranks, policy="connected")),
                ExpertShape(size.layers, experts, slots, ranks),
                steps=batches_by_rank(model, second.odds, seed, size.steps),
                before=list(first.counts),
                planned=model.sub_windows // SUB_WINDOW,
            )
            found.append(routed(trial, MODES))
        rows.append({
            "shape": shape_name(experts, slots, ranks),
            "tokens": model.rows // TOP_K,
            **_means(found, MODES),
        })  # fmt: skip
        sys.stderr.write(f"calibrated, {slots} slots\n")
    return rows


def _means(found: Sequence[dict[str, Floats]], modes: Sequence[str]) -> Row:
    """[mean, half] of each mode over the layers of all trials."""
    return {mode: over_layers(np.concatenate([each[mode] for each in found], 1)) for mode in modes}


def batches_by_rank(model: Model, odds: Floats, seed: int, count: int) -> list[Counts]:
    """(layers, ranks, experts) of so many batches."""
    generator = np.random.default_rng((seed, 2))
    return [
        split_by_rank(each, model.ranks, generator) for each in batches(model, odds, seed, count)
    ]


def record(seed: int, steps: int) -> Counts:
    """(steps, layers, 8, experts): what each rank's rows ask for."""
    sys.stderr.write(f"recording {steps} steps, seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="equipoise-shares-") as folder:
        out = Path(folder) / "recorded"
        command = ["record", "--ranks", "8", "--steps", str(steps), "--seed", str(seed)]
        command += ["--quiet", "--out", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "equipoise", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"equipoise record failed: {done.stderr[-2000:]}")
        by_rank = read_statistics(out).by_rank
    assert by_rank is not None
    return by_rank.transpose(1, 2, 0, 3)


def recorded_trials(
    recording: Counts, size: Size, ranks: int, slots: int
) -> Iterator[tuple[str, Trial]]:
    """Of each of the two switches: the windows before and behind it, and the last two before it."""
    steps = [_merged(step, ranks) for step in recording]
    for switch in (size.phase, 2 * size.phase):
        for kind, middle in (("switch", switch), ("steady", switch - size.window)):
            before = [step.sum(axis=1) for step in steps[middle - size.window : middle]]
            load = np.sum(before, axis=0)
            planned = plan(load, slots=slots, ranks=ranks, policy="connected")
            yield (
                kind,
                Trial(
                    layout_of(planned),
                    ExpertShape(load.shape[0], load.shape[1], slots, ranks),
                    steps=steps[middle : middle + size.window],
                    before=before,
                    planned=size.window // SUB_WINDOW,
                ),
            )


def recorded(size: Size) -> tuple[list[Row], list[Row], Row]:
    """Rows of windows, rows of steps since a switch, and figures."""
    recordings = [record(seed, 3 * size.phase) for seed in range(size.seeds)]
    rows, since = [], []
    for ranks, slots in RECORDED:
        by_kind: dict[str, list[dict[str, Floats]]] = {"switch": [], "steady": []}
        for recording in recordings:
            for kind, trial in recorded_trials(recording, size, ranks, slots):
                found = routed(trial, RECORDED_MODES)
                by_kind[kind].append({mode: each.mean(axis=1) for mode, each in found.items()})
        words = f"{ranks} ranks, {slots} slots"
        rows += [_window_row(words, kind, found) for kind, found in by_kind.items()]
        since += list(_since_rows(words, by_kind["switch"]))
    below = [row["below_lagged"] for row in rows]
    switches = [row["below"] for row in rows if row["kind"] == "switch"]
    return rows, since, {
        "recorded_below_lagged": {
            "value": f"{sum(part for part, _ in below)} of {sum(all_ for _, all_ in below)}",
            "met": all(part == all_ for part, all_ in below),
        },
        "recorded_switch": {
            "value": min(least for _, least, _ in switches),
            "note": f"medians {', '.join(f'{median:.0%}' for median, _, _ in switches)}",
        },
    }  # fmt: skip


def _window_row(shape: str, kind: str, found: Sequence[dict[str, Floats]]) -> Row:
    means = {mode: np.array([window[mode].mean() for window in found]) for mode in found[0]}
    return {
        "shape": shape,
        "kind": kind,
        **{mode: spread(values) for mode, values in means.items()},
        "below": spread(1 - means["local"] / means["static"]),
        "below_lagged": [int((means["local"] < means["lagged"]).sum()), len(found)],
    }


def _since_rows(shape: str, found: Sequence[dict[str, Floats]]) -> Iterator[Row]:
    for steps, (first, last) in SINCE.items():
        values = {mode: [window[mode][first:last] for window in found] for mode in found[0]}
        if all(part.size for parts in values.values() for part in parts):
            means = {mode: float(np.mean(parts)) for mode, parts in values.items()}
            yield {"shape": shape, "steps": steps, **means}


def _merged(step: Counts, ranks: int) -> Counts:
    """(layers, ranks, experts) of (layers, 8, experts): request i is rank i % ranks's."""
    layers, sources, experts = step.shape
    merged: Counts = step.reshape(layers, sources // ranks, ranks, experts).sum(axis=1)
    return merged


PLACEMENT_RULES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (288, "connected", {}),
    (288, "connected", {"sigma": 1.0}),
    (288, "greedy", {}),
    (288, "incremental", {}),
    (288, "incremental", {"slack": 0.0}),
    (288, "incremental", {"slack": 0.3}),
    (288, "incremental", {"target": 0.005}),
    (288, "incremental", {"sigma": 1.0}),
    (288, "incremental", {"split": "even"}),
    (288, "incremental", {"headroom": 4}),
    (288, "incremental", {"headroom": 8}),
    (288, "incremental", {"headroom": 16}),
    (288, "incremental", {"headroom": 32}),
    (320, "connected", {}),
    (320, "greedy", {}),
    (320, "incremental", {}),
    (320, "incremental", {"headroom": 8}),
    (320, "incremental", {"headroom": 16}),
    (256, "connected", {}),
    (256, "greedy", {}),
    (256, "incremental", {}),
)
"""Slots, policy and options of a plan."""
PLACEMENT_MODES = "static", "local", "node_8", "exact"


def placements(size: Size) -> list[Row]:
    """What local shares make of other placements: calibrated loads, two switches of domain."""
    experts, _, ranks = MAIN
    model = Model(layers=size.layers, experts=experts, ranks=ranks, period=2)
    rows = []
    for slots, policy, options in PLACEMENT_RULES:
        shape = ExpertShape(size.layers, experts, slots, ranks)
        found, moved = [], []
        for seed in range(size.seeds):
            for moves, trial in _served_after_switches(
                model, seed, shape, policy, options, size.steps // 4
            ):
                moved.append(moves)
                found.append(routed(trial, PLACEMENT_MODES))
        words = [f"`{policy}`", *(f"`{name}` {value}" for name, value in options.items())]
        rows.append({
            "slots": slots,
            "rule": ", ".join(words),
            "moved": statistics.fmean(moved),
            **_means(found, PLACEMENT_MODES),
        })  # fmt: skip
        sys.stderr.write(f"{slots} slots, {rows[-1]['rule']}\n")
    return rows


def _served_after_switches(
    model: Model,
    seed: int,
    shape: ExpertShape,
    policy: str,
    options: dict[str, Any],
    steps: int,
) -> Iterator[tuple[float, Trial]]:
    """Slots that a plan moves at a switch, and the next window, served by what it has made."""
    installed: Placement | None = None
    for number, (window, later) in enumerate(pairwise(windows(model, seed, 6))):
        made = plan(
            window.counts if "sigma" in options else window.load,
            slots=shape.slots,
            ranks=shape.ranks,
            policy=policy,
            installed=installed,
            **options,
        )
        placement = made.placement
        if window.switched:
            assert installed is not None
            moves = made.moves / placement.size
            shares = solve_shares(window.load, placement, shape)
            batches_ = batches_by_rank(model, later.odds, 10 * seed + number, steps)
            yield moves, Trial(Layout(placement, shares), shape, batches_)
        installed = placement


def main_figures(rows: Sequence[Row], generated: Sequence[Row]) -> Row:
    """What bars are about."""
    by_place = {(row["shape"], row["tokens"]): row for row in rows}

    def figure(row: Row, mode: str) -> Row:
        return {"value": row[mode][0], "note": f"± {row[mode][1]:.4f}"}

    main = {
        f"{name}_{tokens}": figure(by_place[shape_name(*MAIN), tokens], mode)
        for name, mode in (("local", "local"), ("node", "node_8"))
        for tokens in (256, 128, 64, 32)
    }
    ratios = [
        row["local"][0] / row["static"][0]
        for row in rows
        if row["shape"] == shape_name(*LARGE) and row["tokens"] >= 128
    ]
    return {
        **main,
        "local_320": figure(by_place[shape_name(*DOUBLE), 128], "local"),
        "large_ratio": max(ratios),
        **{
            f"calibrated_{name}": figure(generated[0], mode)
            for name, mode in (("static", "static"), ("local", "local"), ("node", "node_8"))
        },
    }


LOGNORMAL, CALIBRATED = (
    "lognormal popularity",
    "calibrated, each layer's popularity that of a batch",
)
BOUNDS = (
    *((LOGNORMAL, MAIN, tokens, 1) for tokens in (32, 64, 128, 256, 512)),
    *((LOGNORMAL, MAIN, tokens, 8) for tokens in (32, 64, 128, 256)),
    *((LOGNORMAL, DOUBLE, tokens, 1) for tokens in (32, 64, 128, 256)),
    *((CALIBRATED, MAIN, 128, members) for members in (1, 8)),
)
"""Popularity, shape, tokens a rank, ranks of a node."""


def bounds(size: Size) -> list[Row]:
    """One row for each of them."""
    rows = []
    layers = size.layers // 4
    for law, (experts, slots, ranks), tokens, members in (
        BOUNDS if size.layers > QUICK.layers else BOUNDS[1:2]
    ):
        generator = np.random.default_rng(experts + slots + ranks)
        if law == LOGNORMAL:
            odds = popularity(layers, experts, generator)
            load = generator.multinomial(PLANNED_TOKENS * TOP_K * ranks, odds)
        else:
            model = Model(layers=layers, experts=experts, ranks=ranks)
            first, second = windows(model, 0, 2)
            load = first.load
            odds = second.odds * np.exp(model.batch_jitter * generator.standard_normal(load.shape))
            odds /= odds.sum(axis=1, keepdims=True)
        layout = layout_of(plan(load, slots=slots, ranks=ranks, policy="connected"))
        shape = ExpertShape(layers, experts, slots, ranks)
        found = [
            _bound(Table(layout, layer, shape), odds[layer], tokens, members, size, generator)
            for layer in range(layers)
        ]
        rows.append({
            "shape": f"{shape_name(experts, slots, ranks)}; {law}",
            "tokens": tokens,
            "mode": "`local`" if members == 1 else f"`node`, of {members}",
            **{key: _interval([each[key] for each in found]) for key in found[0]},
        })  # fmt: skip
        sys.stderr.write(f"bound, {rows[-1]['shape']}, {tokens} tokens, node of {members}\n")
    return rows


def _interval(values: Sequence[float]) -> list[float]:
    found = interval(values)
    return [found.mean, found.half]


def _bound(
    table: Table,
    odds: Floats,
    tokens: int,
    members: int,
    size: Size,
    generator: np.random.Generator,
) -> dict[str, float]:
    sources = table.ranks // members
    fit = generator.multinomial(tokens * TOP_K * members, odds, size=size.samples)
    ranks = generator.multinomial(tokens * TOP_K, odds, size=2 * size.samples)
    fresh = ranks.reshape(-1, members, odds.size).sum(axis=1)
    bound: Bound = team_bound(fit, fresh, table, sources)
    route: Callable[[Batch], Counts] = (
        (lambda batch: local(batch, table))
        if members == 1
        else (lambda batch: node(batch, table, members))
    )
    batches_ = ranks.reshape(-1, table.ranks, odds.size)
    loads = np.array([route(batch_of(each, generator)) for each in batches_]).T.astype(np.float64)
    ours = root_mean_square(loads)
    imbalance = float((loads.max(axis=0) / loads.mean(axis=0) - 1).mean())
    return {
        **vars(bound),
        "ours": ours,
        "ours_imbalance": imbalance,
        "above": ours / bound.least - 1,
        "leaning_gains": 1 - bound.leaned_imbalance / bound.levelled_imbalance,
    }


SPEED_TOKENS = 16, 32, 64, 128, 256, 512, 1024
SPEED_SHAPES = MAIN, LARGE
CALLS = 200
REDUCING_RANKS = 2
"""As many as have a core here: more would wait for each other's turns."""
REDUCING_PROGRAM, EXCHANGING_PROGRAM = (
    Path(__file__).parent / "lib" / name
    for name in ("all_reduce_rank.py", "exact_exchange_rank.py")
)
EXCHANGING = (2, 16), (2, 128), (2, 512), (4, 128)
"""Ranks, and tokens of each."""
EXCHANGING_CALLS, EXCHANGING_SECONDS = 40, 240.0


def speed(size: Size) -> tuple[list[Row], list[Row]]:
    """Kernels by shape and tokens, and all-reduces of as many counts as there are experts."""
    kernels = []
    for experts, slots, ranks in SPEED_SHAPES:
        generator = np.random.default_rng(0)
        odds = popularity(1, experts, generator)
        load = generator.multinomial(PLANNED_TOKENS * TOP_K * ranks, odds)
        layout = layout_of(plan(load, slots=slots, ranks=ranks, policy="connected"))
        table = Table(layout, 0, ExpertShape(1, experts, slots, ranks))
        for tokens in SPEED_TOKENS if size.layers > QUICK.layers else (64,):
            ids = generator.choice(experts, size=tokens * TOP_K, p=odds[0]).astype(np.int32)
            levelled, hashed = _kernels(table, ids)
            pairs = [(cpu_seconds(levelled), cpu_seconds(hashed)) for _ in range(size.pairs)]
            kernels.append({
                "shape": shape_name(experts, slots, ranks),
                "tokens": tokens,
                "levelled": spread((one for one, _ in pairs), 1e6),
                "hashed": spread((other for _, other in pairs), 1e6),
                "ratio": spread(one / other for one, other in pairs),
            })  # fmt: skip
    reduces = [
        {
            "experts": experts,
            "ranks": REDUCING_RANKS,
            "microseconds": _all_reduce(experts, REDUCING_RANKS),
        }
        for experts in (MAIN[0], LARGE[0])
    ]
    return kernels, reduces


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of one call: what others take of the core meanwhile does not count."""
    work()
    began = time.process_time()
    for _ in range(CALLS):
        work()
    return (time.process_time() - began) / CALLS


def _kernels(
    table: Table, ids: npt.NDArray[np.int32]
) -> tuple[Callable[[], object], Callable[[], object]]:
    slots, counts = np.empty_like(ids), np.empty(table.start.size - 1, np.int32)
    return (
        lambda: _native.route_levelled(
            ids, table.start, table.replicas, table.ranks, 3, 1, slots, counts
        ),
        lambda: _native.route_hashed(
            ids, table.start, table.replicas, table.cumulative, 3, 1, 7, slots, counts
        ),
    )


def _all_reduce(experts: int, ranks: int) -> list[float]:
    """[median, least, most] over rounds of the microseconds of one, on rank 0."""
    line = _first_rank(REDUCING_PROGRAM, {"experts": experts}, ranks, 60.0)
    return spread(line["microseconds"])


def _first_rank(program: Path, task: Row, ranks: int, seconds: float) -> Row:
    """What rank 0 says of a task that all ranks do, as processes of this machine over gloo."""
    host = registry.communicator("gloo").host()
    try:
        address, port = host.address
        tasks = [
            {"rank": rank, "ranks": ranks, "host": address, "port": port, **task}
            for rank in range(ranks)
        ]
        [[line], *_] = serve_on_ranks(program, tasks, [Place()] * ranks, seconds)
    finally:
        host.close()
    return line


def exchanges(size: Size) -> list[Row]:
    """A layer with exact shares: sizes by the gathered counts, and by a collective of their own."""
    experts, slots, _ = MAIN
    rows = []
    for ranks, tokens in EXCHANGING[: 1 if size is QUICK else None]:
        task = {
            "experts": experts,
            "slots": slots,
            "tokens": tokens,
            "rounds": size.pairs,
            "calls": EXCHANGING_CALLS,
            "seconds": EXCHANGING_SECONDS,
        }
        line = _first_rank(EXCHANGING_PROGRAM, task, ranks, EXCHANGING_SECONDS)
        columns = {name: spread(values) for name, values in line.items()}
        for part in ("", "_layer"):
            pairs = zip(line[f"known{part}"], line[f"told{part}"], strict=True)
            columns[f"ratio{part}"] = spread(one / other for one, other in pairs)
        rows.append({"ranks": ranks, "tokens": tokens, **columns})
    return rows


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bound", action="store_true", help="how level any rule can be")
    parser.add_argument("--speed", action="store_true", help="what `local` costs")
    parser.add_argument("--exchange", action="store_true", help="what counts save an exchange")
    parser.add_argument("--quick", action="store_true", help="a little; nothing is kept")
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    command = ["python", "benchmarks/shares.py"]
    figures: Row = {}
    tables: Mapping[str, Sequence[Row]]
    if options.bound:
        name, command = "shares_bound", [*command, "--bound"]
        tables = {"bounds": bounds(size)}
    elif options.speed:
        name, command = "shares_speed", [*command, "--speed"]
        tables = dict(zip(("kernels", "reduces"), speed(size), strict=True))
    elif options.exchange:
        name, command = "shares_exchange", [*command, "--exchange"]
        tables = {"exchanges": exchanges(size)}
    else:
        name = "shares"
        rows = multinomial(size, SHAPES[:1] if options.quick else SHAPES)
        generated = calibrated(size)
        windows_found, since, figures = recorded(size)
        if not options.quick:
            figures |= main_figures(rows, generated)
        tables = {
            "multinomial": rows,
            "calibrated": generated,
            "recorded": windows_found,
            "since": since,
            "placements": placements(size),
        }
    show(name, figures, tables)
    if not options.quick:
        save(name, command, figures, tables)


if __name__ == "__main__":
    main()
