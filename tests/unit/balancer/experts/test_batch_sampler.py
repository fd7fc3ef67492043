"""The step that is sampled in each sub-window, beside what the routers did in that very step."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers.mutants.balancer_breakages import Around, FabricWith, SerialGroup
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.strategies.engine_events import RecordingSink
from helpers.strategies.hypothesis_examples import few
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.balancer import ExpertBalancer, open_balancer
from equipoise.balancer.experts.batch_sampler import BatchSampler, CopiedStep
from equipoise.balancer.experts.config import BalancerConfig, Locality, RoutingRule, ShareMode
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import (
    NO_EVENTS,
    BatchSampled,
)
from equipoise.balancer.experts.runtime.jobs import immediate
from equipoise.balancer.observe.aggregator import measure_batch_balance
from equipoise.hal.errors import CommunicatorFailed
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Event, Role

RANKS = 4
SHAPE = ExpertShape(layers=2, experts=5, slots=8, ranks=RANKS)
PER_RANK = SHAPE.slots_per_rank
STEPS = 22
LEVELLED = (
    {"shares": ShareMode.LOCAL},
    {"shares": ShareMode.LOCAL, "ranks_sharing_rows": 2},
    {"shares": ShareMode.NODE, "nodes": 2},
    {"shares": ShareMode.EXACT},
    {"shares": ShareMode.EXACT, "ranks_sharing_rows": 2},
    {"shares": ShareMode.EXACT, "locality": Locality.PREFER},
)
"""Modes in which the counts of a step decide where each of its rows goes."""
DRAWN = (
    {"shares": ShareMode.STATIC},
    {"shares": ShareMode.LAGGED},
    {"routing_rule": RoutingRule.VLLM_ROW_HASH},
    {"routing_rule": RoutingRule.TRTLLM_ROUND_ROBIN},
)


def mode_name(changes: dict[str, Any]) -> str:
    """For the name of a test."""
    return "-".join(map(str, changes.values()))


WrapFabric = Callable[[GroupMember], Any]


@dataclass(frozen=True)
class RoutedStep:
    """What one rank's compute stream saw in a step.

    Attributes:
        counts: (layers, experts), rows of its batch.
        rank_rows: (layers, ranks), where they went.
        digest: of the layout.
    """

    counts: npt.NDArray[np.int64]
    rank_rows: npt.NDArray[np.int64]
    digest: str


@dataclass(frozen=True)
class Run:
    """One rank's run.

    Attributes:
        steps: what its routers did.
        sink: what it was told.
        commits: boundaries at which a rebalance was committed.
    """

    steps: list[RoutedStep]
    sink: RecordingSink
    commits: list[int]

    @property
    def samples(self) -> list[BatchSampled]:
        return [event for event in self.sink.events if isinstance(event, BatchSampled)]


def batch(rank: int, step: int, layer: int, seed: int, sharing: int) -> torch.Tensor:
    """Expert ids, int32 [n, 2], of which some are padding and many name an expert that is hot."""
    dice = np.random.default_rng((seed, rank // sharing, step, layer))
    ids = dice.integers(-1, SHAPE.experts, (int(dice.integers(0, 40)), 2), dtype=np.int32)
    ids[dice.random(ids.shape) < 0.5] = (step // 6 + layer + seed) % SHAPE.experts
    return torch.from_numpy(ids)


def config(changes: dict[str, Any]) -> BalancerConfig:
    cadence = {"window_size": 4, "step_interval": 4, "sub_window": 2, "timeout": WATCHDOG}
    return BalancerConfig(name="sampled", **(cadence | changes))


def served(
    member: GroupMember,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
    wrap: WrapFabric = lambda member: member.fabric,
    watching: tuple[int, ...] = tuple(range(RANKS)),
) -> Run:
    """Serves `STEPS` steps with an event sink on the ranks that watch."""
    placement = initial_placement(SHAPE)
    own = placement[:, member.rank * PER_RANK : (member.rank + 1) * PER_RANK]
    rows = torch.tensor(own + 1, dtype=torch.float32).reshape(-1, 1)
    slots = SlotLayout(tuple((Segment("w", row),) for row in rows), staging=len(rows))
    settings, sink = config(changes or {}), RecordingSink()
    balancer = open_balancer(
        member.accelerator,
        wrap(member),
        member.accelerator.slot_store(slots),
        SHAPE,
        Layout(placement, even_shares(placement, SHAPE.experts)),
        settings,
        event_sink=sink if member.rank in watching else NO_EVENTS,
    )
    lockstep = member.fabric.open("lockstep")
    steps: list[RoutedStep] = []
    for step in range(STEPS):
        balancer.before_step(step)
        wait_for_workers(balancer)
        steps.append(routed(member, balancer, step, partial(batch, seed=seed)))
        lockstep.barrier().result(30.0)  # stands for the exchange of tokens
    balancer.close()
    lockstep.barrier().result(30.0)
    reports = balancer.engine.reports
    return Run(steps, sink, [report.step for report in reports if report.copies])


def wait_for_workers(balancer: ExpertBalancer) -> None:
    """Waits for what overlaps with a step, which a real one is long enough for."""
    workers = balancer.engine._workers
    waits = [
        worker.start(immediate(lambda: None), "wait")
        for worker in (workers.planner, workers.transfer, workers.load)
    ]
    workers.release()
    for wait in waits:
        wait.result(20.0)


def routed(
    member: GroupMember, balancer: ExpertBalancer, step: int, batch: Callable[..., torch.Tensor]
) -> RoutedStep:
    """Routes the rank's batches of a step on the compute stream."""
    compute = member.accelerator.stream(Role.COMPUTE)
    sharing = balancer.context.config.ranks_sharing_rows
    counts = np.zeros((SHAPE.layers, SHAPE.experts), dtype=np.int64)
    rank_rows = np.zeros((SHAPE.layers, RANKS), dtype=np.int64)

    def route(layer: int) -> None:
        ids = batch(member.rank, step, layer, sharing=sharing)
        slots = balancer.router.route(layer, step, ids).numpy().ravel()
        real = ids.numpy().ravel()
        counts[layer] = np.bincount(real[real >= 0], minlength=SHAPE.experts)
        rank_rows[layer] = np.bincount(slots[real >= 0] // PER_RANK, minlength=RANKS)

    for layer in range(SHAPE.layers):
        compute.launch(partial(route, layer))
    compute.synchronize(30.0)
    return RoutedStep(counts, rank_rows, balancer.serving_state.layout.digest)


def rows_of_step(runs: list[Run], step: int) -> npt.NDArray[np.int64]:
    """(layers, ranks): where the rows of a step went."""
    rank_rows: npt.NDArray[np.int64] = np.sum([run.steps[step].rank_rows for run in runs], axis=0)
    return rank_rows


def mean_imbalance(rank_rows: npt.NDArray[np.int64]) -> float:
    """The formula of docs/metrics.md, in a loop."""
    layers = [rows for rows in rank_rows.tolist() if sum(rows)]
    return float(np.mean([max(rows) * RANKS / sum(rows) - 1 for rows in layers]))


def violations(runs: list[Run], sharing: int, sub_window: int) -> list[str]:
    """Everything by which the samples are not those of the steps that were routed."""
    messages = []
    for run in runs:
        steps = [sample.step for sample in run.samples]
        # The first follows the first sub-window. One comes a boundary after its own is closed.
        if steps != list(range(sub_window, STEPS - 1 - sub_window, sub_window)):
            messages.append(f"steps {steps}")
        for sample in run.samples:
            routed_steps = [rank.steps[sample.step] for rank in runs[::sharing]]
            if sample.counts.tolist() != [step.counts.tolist() for step in routed_steps]:
                messages.append(f"step {sample.step}: counts")
            if sample.layout.digest != routed_steps[0].digest:
                messages.append(f"step {sample.step}: layout")
    return messages


@pytest.mark.parametrize("changes", LEVELLED, ids=mode_name)
@few(3)
@given(seed=st.integers(0, 2**16), sub_window=st.sampled_from((1, 2, 4)))
def test_batch_sample_is_what_routers_did_with_levelled_shares(
    seed: int, changes: dict[str, Any], sub_window: int
) -> None:
    changes = {**changes, "sub_window": sub_window}
    runs = on_ranks(RANKS, partial(served, seed=seed, changes=changes))
    sharing = config(changes).ranks_sharing_rows
    assert violations(runs, sharing, sub_window) == []
    for sample in runs[0].samples:
        rank_rows = rows_of_step(runs[::sharing], sample.step)
        computed = sample.rank_rows(sample.counts, sample.layout, SHAPE, sample.step)
        assert computed.tolist() == rank_rows.tolist()
        measured = measure_batch_balance(sample)
        assert measured.imbalance == pytest.approx(mean_imbalance(rank_rows))
        assert measured.step == sample.step


@pytest.mark.parametrize("changes", DRAWN, ids=mode_name)
@few(2)
@given(seed=st.integers(0, 2**16))
def test_batch_sample_has_counts_and_layout_of_its_step_with_drawn_rows(
    seed: int, changes: dict[str, Any]
) -> None:
    runs = on_ranks(RANKS, partial(served, seed=seed, changes=changes))
    assert violations(runs, 1, 2) == []
    for sample in runs[0].samples:
        measured = measure_batch_balance(sample)
        if "shares" in changes:  # rows are drawn by the installed shares: nothing is levelled
            assert measured.imbalance == measured.unlevelled_imbalance
        routed_rows = rows_of_step(runs, sample.step)
        rank_rows = sample.rank_rows(sample.counts, sample.layout, SHAPE, sample.step)
        assert rank_rows.sum(axis=1).tolist() == routed_rows.sum(axis=1).tolist()


class OperationLog(Around):
    """A communicator that notes the operations that are issued, and on which thread."""

    def __init__(self, inner: Any, operations: list[tuple[str, str]]) -> None:
        super().__init__(inner)
        self._operations = operations

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self._operations.append(("all_reduce", threading.current_thread().name))
        return self._inner.all_reduce(tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        self._operations.append(("all_gather", threading.current_thread().name))
        return self._inner.all_gather(out, tensor)


def logged_run(member: GroupMember, watching: tuple[int, ...]) -> tuple[Run, list[str]]:
    """A run, and the operations that its sums and samples took."""
    operations: list[tuple[str, str]] = []

    def wrap(member: GroupMember) -> Any:
        return FabricWith(member.fabric, ".loads", lambda inner: OperationLog(inner, operations))

    run = served(member, wrap=wrap, watching=watching)
    return run, [operation for operation, _ in operations]


def test_batch_sampler_gathers_nothing_without_event_sink() -> None:
    for run, operations in on_ranks(RANKS, partial(logged_run, watching=())):
        assert set(operations) == {"all_reduce"}
        assert run.sink.events == []


def test_batch_sampler_gathers_on_all_ranks_if_one_has_an_event_sink() -> None:
    results = on_ranks(RANKS, partial(logged_run, watching=(2,)))
    # Closed before steps 2, 4, ... 20; there is no step to gather yet at the first.
    expected = ["all_reduce", *["all_reduce", "all_gather"] * 9]
    assert [operations for _, operations in results] == [expected] * RANKS
    assert [bool(run.samples) for run, _ in results] == [False, False, True, False]


class StreamOrdered(Around):
    """Declares that operations are ordered with the stream, and waits for it at each."""

    def __init__(self, inner: Any, member: GroupMember) -> None:
        super().__init__(inner)
        self._compute = member.accelerator.stream(Role.COMPUTE)
        self.capabilities = replace(
            inner.capabilities, stream_ordered=True, independent_groups=False
        )

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self._compute.synchronize(30.0)
        return self._inner.all_reduce(tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        self._compute.synchronize(30.0)
        return self._inner.all_gather(out, tensor)


@pytest.mark.parametrize("kind", ["stream_ordered", "dependent"])
def test_gathers_are_issued_by_the_step_thread_if_sums_are(kind: str) -> None:
    operations: list[tuple[str, str]] = []

    def wrap(member: GroupMember) -> Any:
        def declare(inner: Any) -> Any:
            logged = OperationLog(inner, operations)
            if kind == "dependent":
                return SerialGroup(logged, set())
            return StreamOrdered(logged, member)

        return FabricWith(member.fabric, ".loads", declare)

    runs = on_ranks(RANKS, partial(served, wrap=wrap))
    assert violations(runs, 1, 2) == []
    assert not [name for _, name in operations if name.startswith("equipoise.")]
    assert "all_gather" in {operation for operation, _ in operations}


class FailingAfter(Around):
    """A communicator whose operation of this name fails."""

    def __init__(self, inner: Any, name: str) -> None:
        super().__init__(inner)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise CommunicatorFailed(f"{name} of 'sampled.loads' lost its peer")
        return getattr(self._inner, name)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_failing_gather_ends_a_run_as_failing_sum_does(operation: str) -> None:
    def wrap(member: GroupMember) -> Any:
        return FabricWith(member.fabric, ".loads", lambda inner: FailingAfter(inner, operation))

    with pytest.raises(CommunicatorFailed, match=f"{operation} of 'sampled.loads'"):
        on_ranks(RANKS, partial(served, wrap=wrap))


class SamplesNextLayout(BatchSampler):
    """Mutant: a sample has the layout of the boundary at which it is gathered."""

    def issue_on_worker(self, copied_event: Event) -> None:
        if isinstance(self._copied, CopiedStep):
            self._copied = replace(self._copied, layout=self._installed_layout())
        super().issue_on_worker(copied_event)


class SamplesPreviousLayout(BatchSampler):
    """Mutant: a sample has the layout of the sample before."""

    _layout: Layout | None = None

    def copy(self, step: int, counters: torch.Tensor) -> None:
        super().copy(step, counters)
        assert isinstance(self._copied, CopiedStep)
        previous, self._layout = self._layout, self._copied.layout
        self._copied = replace(self._copied, layout=previous or self._layout)


class SamplesNextStep(BatchSampler):
    """Mutant: a sample has the number of the step after it."""

    def copy(self, step: int, counters: torch.Tensor) -> None:
        super().copy(step + 1, counters)


class SamplesLate(BatchSampler):
    """Mutant: the counters are read when they are gathered, not when they are copied."""

    def copy(self, step: int, counters: torch.Tensor) -> None:
        super().copy(step, counters)
        assert isinstance(self._copied, CopiedStep)
        self._copied = replace(self._copied, counts=counters)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (BatchSampler, ""),
        (SamplesNextLayout, "layout"),
        (SamplesPreviousLayout, "layout"),
        (SamplesNextStep, "counts"),
        (SamplesLate, "counts"),
    ],
)
def test_oracle_detects_samples_of_another_step_or_layout(
    mutant: type[BatchSampler], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.balancer.experts.balancer.BatchSampler", mutant)
    runs = on_ranks(RANKS, partial(served, seed=1))
    assert len(runs[0].commits) > 1
    found = violations(runs, 1, 2)
    assert any(line.endswith(message) for line in found) if message else found == []
