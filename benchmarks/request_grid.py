"""Where `fit` is behind: eight workloads, 4 to 128 workers, 8 to 256 slots, five loads.

    EQUIPOISE_TRACES=FOLDER python benchmarks/request_grid.py
    python benchmarks/request_grid.py --quick     one seed, three shapes, no traces; nothing is kept

Simulated, so the same figures come on every machine. Each cell of workload, shape and load plays
the same requests, of five seeds on which nothing was tuned, to `fit` and to published policies.
Tokens a second are compared with those of `br0`, mean times to the first token with those of the
best published policy of the cell, in logarithms. Differences are taken seed by seed; an interval is
that of 95 %.

Two shapes have workers with different numbers of slots; they are counted apart.

Three workloads are drawn here, by statistics of traces that cannot be kept beside the code:
lognormal, with the mean and the median of the trace, and cut off at its largest value.

Writes benchmarks/results/request_grid.json; `python benchmarks/report.py` shows it.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt
from lib.results import Row, save
from report import show
from request_routing import AZURE, MOONCAKE, SEEDS, folder, trace

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_comparison import (
    ComparisonSetup,
    Interval,
    PolicyResult,
    compare_policies,
    interval,
    named_policies,
)
from equipoise.balancer.requests.simulation import Scenario
from equipoise.balancer.requests.workload import Workload
from equipoise.balancer.requests.workload_generators import generate


@dataclass(frozen=True)
class TokenCounts:
    """Statistics of the tokens of prompts, or of outputs."""

    mean: float
    median: float
    most: int

    def draw(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Draw [count] from the lognormal that has this mean and median, at most `most`."""
        sigma = sqrt(2 * log(self.mean / self.median))
        values = self.median * np.exp(sigma * generator.standard_normal(count))
        return np.clip(np.rint(values), 1, self.most).astype(np.int64)


DRAWN = {
    # Azure's requests for code of November 2023 (8,819).
    "code": (TokenCounts(2047.8, 1469, 7437), TokenCounts(27.9, 13, 1899)),
    # Mooncake's synthetic trace (3,993 requests; FAST 2025).
    "documents": (TokenCounts(15325, 11587, 191378), TokenCounts(149, 69, 893)),
    # The first 8,000 requests of BurstGPT (arXiv 2401.17644).
    "burst": (TokenCounts(362.9, 217, 14117), TokenCounts(57.0, 7, 3206)),
}
"""Prompts and outputs: short answers, long prompts, and outputs with a very heavy tail."""
GENERATED = ("prop", "reason", "sharegpt")
TRACED = {"Mooncake": MOONCAKE, "Azure": AZURE}
SHAPES = {
    f"{workers} x {slots}": (slots,) * workers
    for workers, slots in ((8, 16), (8, 64), (16, 32), (4, 256), (32, 128), (64, 16), (128, 8))
}
"""Slots of each worker."""
MIXED = {"4 x 64 + 4 x 128": (64,) * 4 + (128,) * 4, "3 x 32 + 256": (32,) * 3 + (256,)}
"""Two generations of accelerators; and one worker that has most of the slots."""
LOADS = (0.5, 0.8, 1.0, 1.2, None)
"""Parts of the capacity; None: always requests that wait."""
PUBLISHED = ("jsq", "vllm", "sglang_tokens", "jsq_load", "fast_phi", "br0")
"""Without `brh`: with survival as its predictor it decides as `br0`, in 50 times the time."""
REQUESTS_PER_SLOT = 20
THROUGHPUT_BAR, TTFT_BAR = -0.01, 1.1


def draw(name: str, count: int, seed: int) -> Workload:
    """Requests of a workload, without times of arrival."""
    if name in TRACED:
        return trace(TRACED[name]).resampled(seed)
    if name in GENERATED:
        return generate(name, count, seed)
    generator = np.random.default_rng(seed)
    prompts, outputs = (lengths.draw(generator, count) for lengths in DRAWN[name])
    return Workload(name, None, prompts, outputs)


def label(load: float | None) -> str:
    """A load as a key of figures."""
    return "saturated" if load is None else f"at_{100 * load:.0f}"


def cell(name: str, slots: tuple[int, ...], load: float | None, seeds: Sequence[int]) -> Row:
    """`fit` beside published policies: of tokens a second, time to the first token, imbalance."""
    count = max(4_000, REQUESTS_PER_SLOT * sum(slots))
    setup = ComparisonSetup(
        workload_factory=lambda seed: draw(name, count, seed),
        seeds=seeds,
        scenario=Scenario(cluster=Cluster(workers=len(slots), slots=slots)),
        load=load,
    )
    results = {
        result.named_policy.label: result
        for result in compare_policies(setup, named_policies((*PUBLISHED, "fit")))
    }
    fit, br0 = results["fit"], results["br0"]
    best = min(PUBLISHED, key=lambda policy: results[policy].interval("ttft_mean").mean)
    return {
        "throughput": pair(fit.relative_to(br0, "throughput")),
        "imbalance": 1 + fit.relative_to(br0, "imbalance").mean,
        "best": best,
        "ttft": pair(ratios(fit, results[best])),
    }


def ratios(result: PolicyResult, other: PolicyResult) -> Interval:
    """Mean time to the first token over that of the other: of the logarithms of each seed.

    In a seed in which hardly anybody waits, the quotient may be anything.
    """
    pairs = zip(result.metrics, other.metrics, strict=True)
    return interval([log(one.ttft_mean / two.ttft_mean) for one, two in pairs])


def pair(value: Interval) -> list[float]:
    """[mean, half]."""
    return [value.mean, value.half]


def figures(rows: Sequence[Row]) -> Row:
    """How many cells miss the bars, by their means, and beyond doubt."""
    cells = [row[label(load)] for row in rows for load in LOADS]
    timed = [row[label(load)] for row in rows for load in LOADS if load is not None]
    behind = [one["throughput"] for one in cells if one["throughput"][0] < THROUGHPUT_BAR]
    late = [one["ttft"] for one in timed if one["ttft"][0] > log(TTFT_BAR)]
    return {
        "cells": len(cells),
        "throughput": float(np.mean([one["throughput"][0] for one in cells])),
        "imbalance": exp(np.mean([log(one["imbalance"]) for one in cells])),
        "ttft": exp(np.mean([one["ttft"][0] for one in timed])),
        "behind": len(behind),
        "behind_beyond_doubt": sum(mean + half < THROUGHPUT_BAR for mean, half in behind),
        "late": len(late),
        "late_beyond_doubt": sum(mean - half > log(TTFT_BAR) for mean, half in late),
    }


def measure(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], seeds: Sequence[int]
) -> list[Row]:
    """A row for each workload and shape."""
    rows = []
    for name in names:
        for shape, slots in shapes.items():
            sys.stderr.write(f"{name} {shape}\n")
            cells = {label(load): cell(name, slots, load, seeds) for load in LOADS}
            rows.append({"case": f"{name}, {shape}", **cells})
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part; nothing is kept")
    quick = parser.parse_args().quick
    traced = () if quick or folder() is None else tuple(TRACED)
    names, seeds = (*DRAWN, *GENERATED, *traced), SEEDS[: 1 if quick else 5]
    rows = measure(names, dict(list(SHAPES.items())[:3]) if quick else SHAPES, seeds)
    mixed = [] if quick else measure(names, MIXED, seeds)
    values = figures(rows)
    if mixed:
        values |= {f"mixed_{key}": value for key, value in figures(mixed).items()}
    show("request_grid", values, {"cells": rows + mixed})
    if not quick and traced:
        command = ["python", "benchmarks/request_grid.py"]
        save("request_grid", command, values, {"cells": rows + mixed})


if __name__ == "__main__":
    main()
