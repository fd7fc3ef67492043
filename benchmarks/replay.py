"""What `equipoise replay` predicts beside what was then served, and how long it takes.

    python benchmarks/replay.py             the shipped model: predicted and served
    python benchmarks/replay.py --speed     100,000 steps of 58 layers of 256 experts

*Predicted and served*: `equipoise run` serves the shipped model on 4 and on 8 ranks in every share
mode, without a balancer, and by vLLM's and TensorRT-LLM's rules. It records the rows of every
expert by step, which is a trace of counts, and the rows that every rank really computed. The trace
is replayed with the same cadence and slots, and both are compared over the steps after the first
plan took effect. Step time is emulated: as long as the rows of the slowest rank, mean over layers.

*Speed*: one balancer with its defaults over a file of counts of 8,192 tokens of 8 experts a step,
whose popularity changes every 25,000 steps; memory is the most that the process had.

Writes benchmarks/results/replay.json or replay_speed.json; `python benchmarks/report.py` shows
them.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from lib.results import Row, save
from numpy.lib.format import open_memmap
from report import show

from equipoise.balancer.experts.config import BalancerConfig, RoutingRule, ShareMode
from equipoise.balancer.experts.placement import ExpertShape
from equipoise.demo.run_record import RunRecord, VariantRecord, load_record
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.replay.candidate import Candidate, OurCandidate, Unbalanced
from equipoise.report.replay.player import Player
from equipoise.report.replay.step_price import DeadZonePrice, mean_of_layers, step_imbalance
from equipoise.report.replay.steps import StepBlock

SLOWEST_RANK = DeadZonePrice(DeadZone(1.0, 1.0, "the rows of the slowest rank"))
RUNS = (
    (4, 40, ("unbalanced", "static", "lagged", "local", "exact"), RoutingRule.SHARES),
    (4, 40, ("static",), RoutingRule.VLLM_ROW_HASH),
    (4, 40, ("static",), RoutingRule.TRTLLM_ROUND_ROBIN),
    (8, 40, ("unbalanced", "static", "lagged", "local", "exact"), RoutingRule.SHARES),
)
"""Ranks, slots, variants and routing rule."""
STEPS, LAYERS, EXPERTS, TOKENS, TOP_K = 100_000, 58, 256, 8192, 8
RANKS, SLOTS = 32, 288
PHASE, BLOCK = 25_000, 500


def accuracy() -> None:
    """Serve, replay, compare."""
    rows = [row for run in RUNS for row in _compared(*run)]
    figures: dict[str, dict[str, object]] = {
        "points": {"value": max(abs(row["predicted"] - row["served"]) for row in rows) * 100},
        "step_time": {"value": max(abs(row["time"]) for row in rows)},
        "plans": {"value": sum(not row["same_plans"] for row in rows)},
    }
    figures["plans"]["met"] = not figures["plans"]["value"]
    save("replay", ["python", *sys.argv], figures, {"served": rows})
    show("replay", figures, {"served": rows})


def _compared(
    ranks: int, slots: int, variants: tuple[str, ...], rule: RoutingRule
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["run", "--ranks", str(ranks), "--slots", str(slots), "--routing-rule", rule]
        if rule is not RoutingRule.SHARES:
            command += ["--shares", "static"]
        command += ["--variants", *variants, "--quiet", "--out", folder]
        subprocess.run([sys.executable, "-m", "equipoise", *command], check=True, stdout=sys.stderr)
        record = load_record(Path(folder) / "record.npz")
    for name in variants:
        yield _row(record, record.variants[name], rule)


def _row(record: RunRecord, served: VariantRecord, rule: RoutingRule) -> Row:
    player = Player(_candidate(record, served.name, rule), SLOWEST_RANK)
    player.play(StepBlock(0, record.expert_rows.astype(np.int32)))
    window = slice(_first_step(record), None)
    predicted = np.concatenate(player.measured.imbalance)[window].mean()
    actual = mean_of_layers(step_imbalance(served.rank_rows.astype(np.float32)))[window].mean()
    planned = [(one.planned, one.copies) for one in player.measured.rebalances if one.copies]
    # A window is closed one step before the rebalance opens.
    made = [(one.opened_at - 1, one.copies) for one in served.rebalances if one.copies]
    return {
        "ranks": record.ranks,
        "how": served.name if rule is RoutingRule.SHARES else f"rule {rule}",
        "predicted": float(predicted),
        "served": float(actual),
        "points": float(predicted - actual) * 100,
        "time": float((1 + predicted) / (1 + actual) - 1),
        "rebalances": len(planned),
        "same_plans": planned == made,
    }


def _candidate(record: RunRecord, name: str, rule: RoutingRule) -> Candidate:
    """As the run was configured: its sub-windows are half a window."""
    if name == "unbalanced":
        shape = ExpertShape(record.layers, record.experts, record.experts, record.ranks)
        return Unbalanced(shape)
    options = record.engine_options
    window = int(str(options["window_size"]))
    config = BalancerConfig(
        shares=ShareMode(name),
        window_size=window,
        sub_window=window // 2,
        step_interval=int(str(options["step_interval"])),
        routing_rule=rule,
    )
    shape = ExpertShape(record.layers, record.experts, record.slots, record.ranks)
    return OurCandidate(ShareMode(name), shape, config)


def _first_step(record: RunRecord) -> int:
    """After the first plan of all variants took effect."""
    return max(
        (one.rebalances[0].step for one in record.variants.values() if one.rebalances), default=0
    )


def speed() -> None:
    """One balancer over a long trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.npy"
        # By a process of its own: a child's most memory begins with that of who starts it.
        writer = multiprocessing.Process(target=_write_trace, args=(path,))
        writer.start()
        writer.join()
        rows = [_timed(path, engine) for engine in ("vllm", "equipoise")]
    figures = {"seconds": rows[0]["seconds"], "memory": max(row["memory"] for row in rows)}
    save("replay_speed", ["python", *sys.argv], figures, {"replayed": rows})
    show("replay_speed", figures, {"replayed": rows})


def _write_trace(path: Path) -> None:
    counts = open_memmap(path, "w+", np.int32, (STEPS, LAYERS, EXPERTS))
    odds = np.exp(np.random.default_rng(0).normal(0, 1, (STEPS // PHASE, LAYERS, EXPERTS)))
    mean = odds / odds.sum(axis=2, keepdims=True) * TOKENS * TOP_K
    for first in range(0, STEPS, BLOCK):
        noise = np.random.default_rng(first).standard_normal((BLOCK, LAYERS, EXPERTS), np.float32)
        step = mean[first // PHASE]
        counts[first : first + BLOCK] = np.maximum(step + np.sqrt(step) * noise, 0)


def _timed(path: Path, engine: str) -> Row:
    command = ["replay", str(path), "--ranks", str(RANKS), "--slots", str(SLOTS), "--quiet"]
    command = [sys.executable, "-m", "equipoise", *command, "--engine", engine]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"replay of {engine} ended with status {status}")
    seconds, memory = time.perf_counter() - began, usage.ru_maxrss * 1024 / 2**30
    return {"engine": engine, "seconds": seconds, "memory": memory}


def main() -> None:
    """Measure, keep and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--speed", action="store_true", help="how long a long trace takes")
    if parser.parse_args().speed:
        speed()
    else:
        accuracy()


if __name__ == "__main__":
    main()
