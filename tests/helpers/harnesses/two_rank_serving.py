"""Models of several families that are served on two ranks, and what each entry of a layer finds."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from helpers.harnesses.two_family_model import (
    DRAFT,
    PER_RANK,
    RANKS,
    TARGET,
    Given,
    mark,
    open_all,
    settings,
    staged_from_peers,
)
from helpers.processes.thread_ranks import GroupMember, on_ranks

from equipoise.balancer.experts.engine.states import RebalanceReport
from equipoise.balancer.experts.model_balancer import BalancerSet, ModelBalancer
from equipoise.balancer.experts.open import UpdatePathFactory
from equipoise.balancer.experts.runtime.jobs import immediate as one_call
from equipoise.hal.stream import Role

STEPS = 26
HOT, LATER = (1, 1, 1, 61), (1, 61, 1, 1)
"""Rows by expert in the first half of the steps, and in the second."""


@dataclass(frozen=True)
class Observation:
    """What one entry of a layer found on one rank."""

    model: str
    step: int
    layer: int
    contents: tuple[tuple[int, ...], ...]
    """By local slot: all bytes in it."""
    expected: tuple[int, ...]
    """By local slot: what the installed placement says."""


@dataclass(frozen=True)
class Story:
    """One rank's run."""

    observations: tuple[Observation, ...]
    reports: dict[str, tuple[tuple[RebalanceReport, ...], ...]]
    """By model, then by family."""
    aborts: int
    staged: int
    """Bytes of all staging."""
    placements: dict[str, list[list[int]]]
    """Placements at the end, by model."""


@dataclass(frozen=True)
class Habit:
    """How the models are served.

    Attributes:
        drafts: how often the draft steps behind a step of the target.
        role: of the stream on which the draft reads.
        between: called between two entries of a step.
    """

    drafts: Callable[[int], int] = lambda step: 2
    role: Role = Role.COMPUTE
    between: Callable[[ModelBalancer, int], object] = lambda balancer, step: None


PLAIN = Habit()


def serve(
    update_path: UpdatePathFactory = staged_from_peers,
    models: Sequence[Given] = (TARGET, DRAFT),
    habit: Habit = PLAIN,
    **config: Any,
) -> list[Story]:
    """Serve on two ranks: a step of the first model, then the other's."""
    balancer_config = settings(**config)

    def program(member: GroupMember) -> Story:
        run = Run(
            member,
            open_all(member, models, update_path, balancer_config),
            models,
            habit,
            range(member.size),
        )
        run.steps(0, STEPS)
        return run.end()

    return on_ranks(RANKS, program)


class Run:
    """One rank, from the first step to the last."""

    def __init__(
        self,
        member: GroupMember,
        balancers: BalancerSet,
        models: Sequence[Given],
        habit: Habit,
        ranks: Sequence[int],
        first_steps: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._member = member
        self._balancers = balancers
        self._models = models
        self._habit = habit
        self._place = list(ranks).index(member.rank)
        self._lockstep = member.fabric.open(f"lockstep{len(ranks)}", ranks)
        self._sights: deque[Observation] = deque()
        self._numbers = {model.name: count(first_steps.get(model.name, 0)) for model in models}
        compute = member.accelerator.stream(Role.COMPUTE)
        self._streams = dict.fromkeys((model.name for model in models), compute)
        if habit.role is not Role.COMPUTE:
            self._streams["draft"] = member.accelerator.stream(habit.role)
            balancers["draft"].attach(self._streams["draft"])

    def steps(self, first: int, last: int) -> None:
        """Of the first model; of the other, as is the habit."""
        for step in range(first, last):
            for place, model in enumerate(self._models):
                for _ in range(self._habit.drafts(step) if place else 1):
                    number = next(self._numbers[model.name])
                    self._step(model, number, LATER if step >= STEPS // 2 else HOT)

    def end(self) -> Story:
        """Close, and tell."""
        self._balancers.close()
        self._lockstep.barrier().result(30.0)
        return self._record()

    def _step(self, model: Given, step: int, rows: tuple[int, ...]) -> None:
        balancer, stream = self._balancers[model.name], self._streams[model.name]
        with balancer.step(step):
            for number in model.visits:
                with balancer.reading_slots(number, step):
                    stream.launch(partial(self._look, balancer, number, step))
                self._habit.between(balancer, step)
            stream.launch(partial(self._count, balancer, rows))
        let_work(balancer)
        self._member.accelerator.synchronize(30.0)
        self._lockstep.barrier().result(30.0)  # stands for the exchange of tokens

    def _look(self, balancer: ModelBalancer, number: int, step: int) -> None:
        self._sights.append(look(balancer, number, step, self._place))

    def _count(self, balancer: ModelBalancer, rows: tuple[int, ...]) -> None:
        for counters in balancer.counters:
            counters += torch.tensor(rows, dtype=torch.int32)

    def _record(self) -> Story:
        every = [group for balancer in self._balancers for group in balancer.groups]
        return Story(
            observations=tuple(self._sights),
            reports={
                balancer.model.name: tuple(tuple(group.engine.reports) for group in balancer.groups)
                for balancer in self._balancers
            },
            aborts=sum(sum(group.engine.aborts.values()) for group in every),
            staged=sum(
                store.staging * store.slot_bytes
                for store in (group.context.store.layout for group in every)
            ),
            placements={b.model.name: b.layout.placement.tolist() for b in self._balancers},
        )


def look(balancer: ModelBalancer, number: int, step: int, rank: int) -> Observation:
    """What the slots of a layer hold, and what they should."""
    model = balancer.model
    row = model.layer(number)
    home = model.groups[model.locate(row, 0).group]
    first = model.locate(row, 0).number
    contents = tuple(
        tuple(sorted({byte for segment in slot for byte in segment.bytes.tolist()}))
        for slot in home.slots[first : first + PER_RANK]
    )
    experts = balancer.layout.placement[row, rank * PER_RANK : (rank + 1) * PER_RANK].tolist()
    own = model.layer_numbers[row]
    return Observation(
        model.name, step, number, contents, tuple(mark(own, expert) for expert in experts)
    )


def let_work(balancer: ModelBalancer) -> None:
    """Wait until what the engines have begun is through, as it is between real steps."""
    for group in balancer.groups:
        workers = group.engine._workers
        through = [
            worker.start(one_call(lambda: None), "look")
            for worker in (workers.planner, workers.transfer)
        ]
        workers.release()
        for task in through:
            with suppress(TimeoutError):
                task.result(20.0)


def violations(records: Sequence[Story]) -> list[str]:
    """Sights of slots that do not hold what the placement says, in words."""
    return [
        f"rank {rank}: {observation}"
        for rank, record in enumerate(records)
        for observation in record.observations
        if observation.contents != tuple((value,) for value in observation.expected)
    ]


def commits(record: Story, model: str) -> list[list[int]]:
    """By family: the boundaries at which a rebalance was committed."""
    return [
        [report.step for report in reports if report.outcome == "committed"]
        for reports in record.reports[model]
    ]
