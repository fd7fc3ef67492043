"""Records of runs that never happened, with answers that can be worked out by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from equipoise.demo.engine_options import engine_options
from equipoise.demo.run_record import Counts, Rebalance, RunRecord, VariantRecord
from equipoise.demo.settings import RunSettings


def rebalance(number: int, step: int, slots: int = 3, outcome: str = "committed") -> Rebalance:
    return Rebalance(
        number=number,
        opened_at=step - 2,
        step=step,
        outcome=outcome,
        copies=slots,
        bytes_moved=slots * 1000,
    )


def variant(
    name: str, rank_rows: Counts, *rebalances: Rebalance, seconds: float = 0.5, outputs: str = "a"
) -> VariantRecord:
    return VariantRecord(
        name=name,
        rank_rows=rank_rows,
        step_seconds=np.full(len(rank_rows), seconds),
        rebalances=rebalances,
        aborts={"digest": 1} if rebalances else {},
        outputs=outputs,
    )


def rows(first: list[int], second: list[int], steps: int = 12) -> Counts:
    """The same two layers at every step: (steps, 2, ranks)."""
    return np.array([[first, second]] * steps, dtype=np.int64)


def record(**changes: object) -> RunRecord:
    """Two ranks, two layers, 12 steps, a switch at 6; exact balances perfectly from step 3 on."""
    rebalances = (rebalance(0, 3), rebalance(1, 5), rebalance(2, 7), rebalance(3, 9))
    exact = rows([20, 20], [20, 20])
    exact[:3] = [[30, 10], [40, 0]]
    values: dict[str, object] = {
        "version": "0.1.0",
        "backend": "cpu",
        "communicator": "gloo",
        "ranks": 2,
        "layers": 2,
        "experts": 4,
        "top_k": 2,
        "slots": 6,
        "steps": 12,
        "shares": "exact",
        "phases": ("prose", "code"),
        "switch_steps": (6,),
        "step_tokens": np.full(12, 20),
        "expert_rows": np.full((12, 2, 4), 10),
        "variants": {
            "unbalanced": variant("unbalanced", rows([30, 10], [40, 0]), seconds=1.0),
            "static": variant("static", rows([25, 15], [20, 20]), *rebalances),
            "lagged": variant("lagged", rows([22, 18], [20, 20]), *rebalances),
            "exact": variant("exact", exact, *rebalances),
        },
        "reference_outputs": "a",
        "engine_options": engine_options(RunSettings()),
        "prompts": ("def f():", "<script>alert(1)</script> & \x00\ufffd"),
        "continuations": ("    return", "</html>"),
        "machine": {"processor": "a processor", "cores": "2"},
    }
    return RunRecord(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def make_record() -> Callable[..., RunRecord]:
    return record


@pytest.fixture
def make_variant() -> Callable[..., VariantRecord]:
    return variant


@pytest.fixture
def make_rebalance() -> Callable[..., Rebalance]:
    return rebalance


@pytest.fixture
def make_rows() -> Callable[..., Counts]:
    return rows
