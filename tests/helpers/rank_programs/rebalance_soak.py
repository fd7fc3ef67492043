"""Two ranks rebalance time after time, and count what they hold."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers.processes import resource_counts as census

from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.balancer.experts.balancer import (
    ExpertBalancer,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
    open_balancer,
)
from equipoise.balancer.experts.config import BalancerConfig, CommitMode, ShareMode
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.pool import HostExpertPool
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import COMMITTED
from equipoise.balancer.experts.transfer.copy_threads import PLAIN, CopyThreadPool
from equipoise.balancer.experts.transfer.host_writes import CpuWriter, HostWeights
from equipoise.balancer.observe.async_sink import AsyncEventSink
from equipoise.balancer.observe.log_lines import BalancednessLogSink, RebalanceLogSink
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.slots import Segment, SegmentType, SlotLayout, SlotStore
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=2, experts=4, slots=6, ranks=2)
LOAD = torch.tensor([[1, 1, 1, 61], [61, 1, 1, 1]], dtype=torch.int32)
"""Rows of a step by layer and expert: of each expert in turn, so that there is always a move."""
PHASE = 8
"""Steps until the load switches."""
ELEMENTS = 5
WAIT = 20.0
CONFIG = BalancerConfig(
    name="soak",
    shares=ShareMode.LAGGED,
    window_size=2,
    step_interval=4,
    sub_window=2,
    min_gain=0,
    max_stalled_steps=1000,
    slots_per_message=1,
    timeout=WAIT,
)


def serve(fabric: Fabric, commit: str, warm: int, rebalances: int) -> dict[str, Any]:
    """Serve until `warm` rebalances moved weights, then for `rebalances` more; census at both."""
    with _serving(fabric, commit) as (balancer, loop):
        loop.run(balancer, warm)
        before = _census(fabric, balancer)
        loop.run(balancer, rebalances)
        after = _census(fabric, balancer)
        steps, outcomes, wrong = loop.step, dict(loop.outcomes), loop.wrong
        balancer.close()
    return {
        "before": before,
        "after": after,
        "steps": steps,
        "outcomes": outcomes,
        "wrong": wrong,
    }


def regroup(
    fabric: Fabric, times: int, rebalances: int, slack: int, settling: int
) -> tuple[int, int]:
    """Make the group anew over and over; how many questions the store holds at first and at last.

    A rebalance asks once a step, and a busy machine takes more steps over its plan, so that what is
    held for the moment depends on time. What may go is let go of a few at a vote: so it is counted
    at the end after each of up to `settling` more rebalances, until it is no more than `slack`
    above the first count.
    """
    with _serving(fabric, CommitMode.STAGED) as (balancer, loop):
        first = last = 0
        for number in range(times):
            loop.run(balancer, rebalances)
            balancer = balancer.reconfigure(range(SHAPE.ranks), loop.step)
            last = loop.questions(fabric)
            first = first if number else last
        for _ in range(settling):
            if last <= first + slack:
                break
            loop.run(balancer, 1)
            last = loop.questions(fabric)
        balancer.close()
    return first, last


@contextmanager
def _serving(fabric: Fabric, commit: str) -> Iterator[tuple[ExpertBalancer, "Loop"]]:
    accelerator = registry.accelerator("cpu").open(0)
    weights = _weights(fabric.control.rank)
    store = accelerator.slot_store(weights)
    placement = initial_placement(SHAPE)
    layout = Layout(placement, even_shares(placement, SHAPE.experts))
    event_sink = AsyncEventSink([RebalanceLogSink("soak"), BalancednessLogSink("soak", 1)])
    with _path(fabric, store, commit) as path:
        balancer = open_balancer(
            accelerator, fabric, store, SHAPE, layout, CONFIG, path, event_sink=event_sink
        )
        yield balancer, Loop(fabric.open("lockstep"), accelerator, weights)
    event_sink.close()
    accelerator.close()


class Loop:
    """Steps that add load, look at slots, and meet; until so many more rebalances moved weights.

    Attributes:
        step: the next one.
        outcomes: of rebalances, and how many moved weights, over the whole run.
        wrong: steps in which a slot did not hold what the tables say; the first few.
    """

    def __init__(
        self,
        tokens: Communicator,
        accelerator: Accelerator,
        weights: SlotLayout,
    ) -> None:
        self._tokens = tokens
        self._accelerator = accelerator
        self._weights = weights
        self._last_report = -1
        self.step = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[int] = []

    def run(self, balancer: ExpertBalancer, rebalances: int) -> None:
        """Until this rank, and every other, has seen so many."""
        target = self.outcomes["moved"] + rebalances
        flag = torch.zeros(1, dtype=torch.int32)
        while int(flag) < SHAPE.ranks:
            balancer.before_step(self.step)
            self._tell(balancer)
            self._look(balancer)
            # Stands for the exchange of tokens; also agrees on the last step.
            flag.fill_(self.outcomes["moved"] >= target)
            self._tokens.all_reduce(flag).result(WAIT)
            self.step += 1

    def questions(self, fabric: Fabric) -> int:
        """How many the store holds: counted by both ranks, while neither asks any."""
        assert isinstance(fabric.control, StoreControlPlane)
        self._tokens.barrier().result(WAIT)
        keys = fabric.control.store.list_keys()
        key_count = torch.tensor([sum(key.startswith(("ballot/", "decision/")) for key in keys)])
        # One number for both, so that both go on or stop.
        self._tokens.broadcast(key_count, 0).result(WAIT)
        return int(key_count)

    def _tell(self, balancer: ExpertBalancer) -> None:
        for report in [
            r for r in list(balancer.engine.reports)[-2:] if r.number > self._last_report
        ]:
            self._last_report = report.number
            self.outcomes[report.outcome] += 1
            self.outcomes["moved"] += report.outcome == COMMITTED and report.copies > 0

    def _look(self, balancer: ExpertBalancer) -> None:
        compute = self._accelerator.stream(Role.COMPUTE)

        def program() -> None:
            per, rank = SHAPE.slots_per_rank, self._tokens.rank
            for layer in range(SHAPE.layers):
                with balancer.reading_slots(layer, self.step):
                    slots = self._weights.slots[layer * per : (layer + 1) * per]
                    contents = [int(slot[0].data[0]) - 1 for slot in slots]
                expected = balancer.serving_state.layout.placement[
                    layer, rank * per : (rank + 1) * per
                ]
                if contents != expected.tolist() and len(self.wrong) < PHASE:
                    self.wrong.append(self.step)
            balancer.load.counters += LOAD.roll(self.step // PHASE, 1)

        compute.launch(program)
        compute.synchronize(WAIT)


def _census(fabric: Fabric, balancer: ExpertBalancer) -> dict[str, Any]:
    """What is held, apart from reports of rebalances, of which an engine keeps the last ones."""
    assert isinstance(fabric.control, StoreControlPlane)
    assert balancer.engine.reports.maxlen is not None
    balancer.engine.reports.clear()
    keys = fabric.control.store.num_keys()
    lengths = census.lengths(balancer)
    return {**census.process(), "keys": keys, "lengths": lengths}


def _weights(rank: int) -> SlotLayout:
    per = SHAPE.slots_per_rank
    mine = initial_placement(SHAPE)[:, rank * per : (rank + 1) * per]
    stacked = torch.tensor(mine + 1, dtype=torch.float32).reshape(-1, 1).repeat(1, ELEMENTS)
    slots = tuple((Segment("weight", row),) for row in stacked)
    return SlotLayout(slots, staging=len(slots))


@contextmanager
def _path(fabric: Fabric, store: SlotStore, commit: str) -> Iterator[UpdatePathConfig]:
    """From peers; or from a host pool, by threads of the host."""
    if CommitMode(commit) is CommitMode.STAGED:
        yield StagedFromPeers()
        return
    segment = SegmentType("weight", (ELEMENTS,), torch.float32)
    layout = PoolLayout((segment,), SHAPE.layers, SHAPE.experts)
    ranks = range(fabric.control.size)
    pool = HostExpertPool.open(fabric.control, ranks, layout, name="soak", timeout=WAIT)
    for layer, expert in pool.owned_experts():
        pool.write(layer, expert, [torch.full((ELEMENTS,), expert + 1.0)])
    pool.seal(WAIT)
    with CopyThreadPool(PLAIN, threads=1) as copy_pool:
        supply = HostWeights(pool, CpuWriter(copy_pool, store, WAIT))
        yield InPlaceFromHost(supply, registry.accelerator("cpu").capabilities)
    pool.close()
