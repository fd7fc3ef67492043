"""What the staging of the vLLM part costs and brings at the shapes of real models.

    python benchmarks/staging.py            DeepSeek-V3, Kimi-K2 and Qwen3-235B on 8 to 64 ranks
    python benchmarks/staging.py --quick    one seed; nothing is kept
    python benchmarks/staging.py --planning CPU seconds of plans, 32 and 320 ranks; nothing is kept

Settings, budget, division into buffers and plans are those that the part takes in a worker; the
shapes and dtypes of the weights are the models'. A steady load is planned on
six times, each time from a window of its own, as in six rebalances in a row. Imbalance is max/mean
- 1 over ranks, mean over layers, of the window that was planned on, with the plan's shares. *One
buffer* is the least that can move anything.

Writes benchmarks/results/staging.json; `python benchmarks/report.py` shows it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from lib.loads import Model, Window, windows
from lib.results import Row, save
from report import show

from equipoise.balancer.experts.open import split_staging
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout, imbalance
from equipoise.balancer.experts.planning.proposal import TransferLimits, staged_proposal
from equipoise.balancer.experts.planning.rebalance_plan import limits_of, plan_rebalance
from equipoise.balancer.experts.weights.expert_weights import (
    LayerGroup,
    LayerTensors,
    TensorName,
    layer_groups,
    slot_tensor,
    strided,
)
from equipoise.integrations.vllm.eplb.config import balancer_config, staging_budget
from equipoise.integrations.vllm.eplb.model import initial_layout
from equipoise.integrations.vllm.settings import EplbSettings

REBALANCES = 6
SEEDS = 3
MAX_APART = 1.1
RANKS = 8, 32, 64
PLANNED_RANKS = 32, 320
NODE = 8
"""Ranks of a node."""
PLANNING_LINE = (
    "{model}, {ranks} ranks, {slots} slots, sigma {sigma:g}: CPU seconds at the start {start}, "
    "steady {steady}, at a switch {switch}\n"
)
PROGRESS = (
    "{model}, {ranks} ranks, {redundant} redundant: {start:.3f}, then {default:.3f}; unlimited "
    "{unlimited:.3f}, one buffer {single:.3f}\n"
)
EPLB = SimpleNamespace(
    window_size=1000, step_interval=3000, log_balancedness=False, log_balancedness_interval=1
)
"""Defaults of vLLM's `EPLBConfig`."""


@dataclass(frozen=True)
class Weights:
    """Routed experts of a model.

    Attributes:
        name: of the model.
        layers: with experts.
        experts: of a layer.
        tensors: dtype and shape of what an expert has, by name.
    """

    name: str
    layers: int
    experts: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]

    def families(self, slots_per_rank: int) -> tuple[LayerGroup, ...]:
        """Of one rank, as the model's registry groups them.

        All layers share the memory of one, which nobody touches, so that it takes none.
        """
        columns = []
        for name, (dtype, shape) in sorted(self.tensors.items()):
            tensor = torch.empty((slots_per_rank, *shape), dtype=dtype)
            columns.append(
                slot_tensor(TensorName(self.name, 0, name), tensor, slots_per_rank, strided)
            )
        return layer_groups((LayerTensors(0, tuple(columns)),) * self.layers)


def fp8(hidden: int, inner: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Block-quantized: a float32 scale for 128 x 128 weights."""
    byte, block = torch.float8_e4m3fn, 128
    return {
        "w13": (byte, (2 * inner, hidden)),
        "w13_scale": (torch.float32, (2 * inner // block, hidden // block)),
        "w2": (byte, (hidden, inner)),
        "w2_scale": (torch.float32, (hidden // block, inner // block)),
    }


MODELS = (
    Weights("DeepSeek-V3", 58, 256, fp8(7168, 2048)),
    Weights("Kimi-K2", 60, 384, fp8(7168, 2048)),
    Weights(
        "Qwen3-235B",
        94,
        128,
        {"w13": (torch.bfloat16, (3072, 4096)), "w2": (torch.bfloat16, (4096, 1536))},
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Of six rebalances with one budget.

    Attributes:
        buffers: of staging.
        nbytes: that they take on a rank.
        start: imbalance before the first.
        end: behind the last.
        short_of_staging: layers that more staging would bring lower in the last.
    """

    buffers: int
    nbytes: int
    start: float
    end: float
    short_of_staging: int


def rebalance_windows(
    weights: Weights, ranks: int, slots: int, budget: str, load_windows: Sequence[Window]
) -> Outcome:
    """Plan for one window after the other, and install each plan."""
    shape = ExpertShape(weights.layers, weights.experts, slots, ranks)
    families = weights.families(shape.slots_per_rank)
    settings = EplbSettings()
    nbytes = {
        "default": staging_budget(settings, families),
        "unlimited": sum(family.nbytes for family in families),
        "one buffer": sum(family.slot_bytes for family in families),
    }[budget]
    (buffers,) = split_staging(families, nbytes)
    limits = limits_of(balancer_config(settings, EPLB, 0, 1, ranks // NODE), buffers)
    layout = loader_layout(weights, slots)
    start, drafted = 0.0, None
    for number, window in enumerate(load_windows):
        drafted = plan_rebalance(window.counts, layout, shape, limits)
        start = start if number else mean(drafted.imbalance_before)
        layout = drafted.layout
    assert drafted is not None
    end = mean(imbalance(load_windows[-1].load, layout, shape))
    return Outcome(
        buffers, buffers * families[0].slot_bytes, start, end, len(drafted.short_of_staging)
    )


def loader_layout(weights: Weights, slots: int) -> Layout:
    """What vLLM's loader installs."""
    return initial_layout(
        SimpleNamespace(
            num_physical_experts=slots,
            num_logical_experts=weights.experts,
            moe_layers=range(weights.layers),
        )
    )


def planning_times(
    weights: Weights, ranks: int, slots: int, sigma: float, seed: int
) -> Iterator[tuple[str, float]]:
    """CPU seconds of a rank's planner for each window: plan, tables and migration plan."""
    shape = ExpertShape(weights.layers, weights.experts, slots, ranks)
    config = balancer_config(EplbSettings(), EPLB, 0, 1, ranks // NODE)
    limits = limits_of(config, shape.slots_per_rank)
    limits = replace(limits, planner=replace(limits.planner, sigma=sigma))
    transfer_limits = TransferLimits(
        config.slots_per_message, config.nodes, shape.slots_per_rank, 0
    )
    loads = Model(
        layers=weights.layers, experts=weights.experts, ranks=ranks, sub_windows=4, period=3
    )
    layout = loader_layout(weights, slots)
    for number, window in enumerate(windows(loads, seed, REBALANCES)):
        began = time.thread_time()
        proposal = staged_proposal(
            plan_rebalance(window.counts, layout, shape, limits), layout, shape, transfer_limits
        )
        kind = "start" if number == 0 else "switch" if window.switched else "steady"
        yield kind, time.thread_time() - began
        layout = proposal.layout


def time_planning(seeds: int) -> None:
    """Print median and greatest CPU time by shape: the planner has one thread."""
    for weights in MODELS:
        for ranks in PLANNED_RANKS:
            # As few redundant slots as every rank has one of, or as divide among the ranks.
            slots = -(-max(weights.experts + 1, ranks) // ranks) * ranks
            for sigma in (0.0, 1.0):
                by_kind: dict[str, list[float]] = {}
                for seed in range(seeds):
                    for kind, seconds in planning_times(weights, ranks, slots, sigma, seed):
                        by_kind.setdefault(kind, []).append(seconds)
                texts = {
                    kind: f"{statistics.median(each):.2f} (at most {max(each):.2f})"
                    for kind, each in by_kind.items()
                }
                shape = {"model": weights.name, "ranks": ranks, "slots": slots, "sigma": sigma}
                sys.stdout.write(PLANNING_LINE.format(**shape, **texts))


def mean(parts: np.ndarray) -> float:  # type: ignore[type-arg]
    """Of all layers, from parts per 65536."""
    return float(parts.mean()) / SHARE_ONE


def row(weights: Weights, ranks: int, redundant: int, seeds: int) -> Row:
    """One line of the table: median over seeds."""
    slots = weights.experts + redundant
    loads = Model(
        layers=weights.layers, experts=weights.experts, ranks=ranks, sub_windows=4, period=99
    )
    outcomes: dict[str, list[Outcome]] = {}
    for seed in range(seeds):
        load_windows = list(windows(loads, seed, REBALANCES))
        for budget in ("default", "unlimited", "one buffer"):
            outcome = rebalance_windows(weights, ranks, slots, budget, load_windows)
            outcomes.setdefault(budget, []).append(outcome)
    default, unlimited, single = outcomes["default"], outcomes["unlimited"], outcomes["one buffer"]
    end, best = middle(default), middle(unlimited)
    return {
        "model": weights.name,
        "ranks": ranks,
        "redundant": redundant,
        "slots": slots // ranks,
        "start": statistics.median(each.start for each in default),
        "default": end,
        "unlimited": best,
        "times": end / best if best else 1.0,
        "buffers": default[0].buffers,
        "mib": default[0].nbytes / 2**20,
        "all_mib": unlimited[0].nbytes / 2**20,
        "single": middle(single),
        "single_mib": single[0].nbytes / 2**20,
        "short": statistics.median(each.short_of_staging for each in single),
    }


def middle(outcomes: Sequence[Outcome]) -> float:
    """Median imbalance behind the last rebalance."""
    return statistics.median(outcome.end for outcome in outcomes)


def main() -> None:
    """Measure, keep and show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is kept")
    parser.add_argument("--planning", action="store_true", help="CPU time of plans alone")
    options = parser.parse_args()
    if options.planning:
        time_planning(1 if options.quick else SEEDS)
        return
    rows = []
    for weights in MODELS:
        for ranks in RANKS:
            for redundant in (0, ranks):
                rows.append(row(weights, ranks, redundant, 1 if options.quick else SEEDS))
                sys.stderr.write(PROGRESS.format(**rows[-1]))
    figures = {"most_apart": max(row["times"] for row in rows)}
    show("staging", figures, {"models": rows})
    if not options.quick:
        save("staging", ["python", "benchmarks/staging.py"], figures, {"models": rows})


if __name__ == "__main__":
    main()
