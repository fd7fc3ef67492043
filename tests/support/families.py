"""A target of two families and a draft, without a model: slots that say what they hold."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import Any

import torch
from support.expert_tensors import Part, tensors_of
from support.threads import Seat, on_ranks
from torch import Tensor

from equipoise.balancer.experts.assembly import AtBoundary, CommitPath, UnderLock
from equipoise.balancer.experts.berth import Berth
from equipoise.balancer.experts.config import EngineConfig, ShareMode
from equipoise.balancer.experts.engine import EpochReport, ExpertEngine
from equipoise.balancer.experts.expert_model import ExpertModel
from equipoise.balancer.experts.jobs import at_once as one_call
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.model_balancer import ModelBalancer
from equipoise.balancer.experts.model_balancers import ModelBalancers
from equipoise.balancer.experts.model_set import ModelSet
from equipoise.balancer.experts.opening import Start, Way, open_model_balancers
from equipoise.balancer.experts.placement import Shape, contiguous
from equipoise.balancer.experts.registration import ModelRegistry
from equipoise.balancer.experts.slot_tensors import SlotTensors
from equipoise.balancer.experts.writers import StreamWriter, Supply
from equipoise.hal import registry as hal
from equipoise.hal.checksum import checksum
from equipoise.hal.stream import Role

RANKS, EXPERTS, PER_RANK = 2, 4, 3
STEPS = 26
HOT, LATER = (1, 1, 1, 61), (1, 61, 1, 1)
"""Rows by expert in the first half of the steps, and in the second."""
BUDGET = 4096


def mark(number: int, expert: int) -> int:
    """All bytes of the slots of an expert."""
    return 1 + expert + EXPERTS * number


def filled(shape: Sequence[int], dtype: torch.dtype, value: int) -> Tensor:
    """A tensor with all bytes alike."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((nbytes,), value, dtype=torch.uint8).view(dtype).view(torch.Size(shape))


Kind = tuple[Part, ...]
"""What an expert consists of."""
WIDE: Kind = (Part("w", (5,), torch.float32, "stacked"),)
SCALED: Kind = (
    Part("w", (3, 2), torch.float8_e4m3fn, "turned"),
    Part("w_scale", (), torch.float32, "each"),
)


def layer_of(kind: Kind, marks: Sequence[int]) -> dict[str, SlotTensors]:
    """Tensors of a layer by name; slot k is filled with the k-th mark."""
    made = {part.name: part.make(len(marks)) for part in kind}
    for given in made.values():
        for tensor, value in zip(tensors_of(given), marks, strict=True):
            memory = torch.empty(0, dtype=torch.uint8).set_(
                tensor.untyped_storage(),
                tensor.storage_offset() * tensor.itemsize,
                (tensor.nbytes,),
            )
            memory.fill_(value)  # copying bools would make them 0 or 1
    return made


@dataclass(frozen=True)
class Given:
    """A model on paper: by number, of what kind a layer is and how often a step enters it."""

    name: str
    kinds: Mapping[int, Kind]
    entries: Mapping[int, int] = field(default_factory=dict)
    shared: Mapping[int, int] = field(default_factory=dict)
    """Numbers of layers with the weights of another."""

    def model(self, rank: int, ranks: int = RANKS) -> ExpertModel:
        """Registered and finalized on a rank."""
        shape = Shape(1, EXPERTS, ranks * PER_RANK, ranks)
        mine = contiguous(shape)[0, rank * PER_RANK : (rank + 1) * PER_RANK].tolist()
        layers = {
            number: layer_of(kind, [mark(number, expert) for expert in mine])
            for number, kind in self.kinds.items()
        }
        registry = ModelRegistry(self.name, PER_RANK, EXPERTS)
        for number, tensors in layers.items():
            registry.register(number, tensors, entries=self.entries.get(number, 1))
        for number, other in self.shared.items():
            registry.register(number, layers[other])
        every = chain.from_iterable(tensors.values() for tensors in layers.values())
        return registry.finalize(
            (f"layers.{number}", tensor)
            for number, tensor in enumerate(chain.from_iterable(map(tensors_of, every)))
        )

    @property
    def visits(self) -> list[int]:
        """Numbers of layers, as one step enters them: each again and again, not at a stretch."""
        left = {number: self.entries.get(number, 1) for number in self.kinds}
        left |= dict.fromkeys(self.shared, 1)
        found = []
        while left:
            found += sorted(left)
            left = {number: count - 1 for number, count in left.items() if count > 1}
        return found


TARGET = Given("target", {3: WIDE, 4: SCALED, 6: WIDE}, shared={8: 3})
DRAFT = Given("draft", {0: WIDE}, entries={0: 3})


@dataclass(frozen=True)
class Sight:
    """What one entry of a layer found on one rank."""

    model: str
    step: int
    layer: int
    held: tuple[tuple[int, ...], ...]
    """By local slot: all bytes in it."""
    promised: tuple[int, ...]
    """By local slot: what the installed placement says."""


@dataclass(frozen=True)
class Story:
    """One rank's run."""

    sights: tuple[Sight, ...]
    reports: dict[str, tuple[tuple[EpochReport, ...], ...]]
    """By model, then by family."""
    aborts: int
    staged: int
    """Bytes of all staging."""
    placements: dict[str, list[list[int]]]
    """Placements at the end, by model."""


class Marks:
    """Weights of a family in the host's memory."""

    def __init__(self, berth: Berth) -> None:
        self._berth = berth

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """Every segment full of the mark."""
        value = mark(self._berth.layers[layer], expert)
        return tuple(
            filled(kind.shape, kind.dtype, value) for kind in self._berth.family.descriptor
        )

    def checksum(self, layer: int, expert: int) -> int:
        """Of their bytes, back to back."""
        parts = [part.reshape(-1).view(torch.uint8) for part in self.view(layer, expert)]
        return checksum(torch.cat(parts))


def by_boundary(berth: Berth) -> CommitPath:
    """Weights come from the peer."""
    return AtBoundary()


def by_lock(berth: Berth) -> CommitPath:
    """Weights come from the host's memory."""
    supply = Supply(Marks(berth), StreamWriter(berth.accelerator, berth.store))
    return UnderLock(supply, hal.accelerator("cpu").capabilities)


def settings(**config: Any) -> EngineConfig:
    """Short epochs."""
    given = {"shares": ShareMode.STATIC, "window_size": 2, "step_interval": 6, "sub_window": 2}
    return EngineConfig(**{"label": "test", "deadline": 8.0, **given, **config})


def open_all(
    seat: Seat,
    models: Sequence[Given],
    way: Way,
    config: EngineConfig,
    row: Sequence[int] = (),
) -> ModelBalancers:
    """Balancers of what is on paper; the slots of each layer hold `row`, or what a model gives."""
    made = ModelSet(tuple(given.model(seat.rank, seat.size) for given in models))
    starts = {}
    for model in made:
        placement = contiguous(model.shape(seat.size))
        if row:
            placement[:] = row
        starts[model.name] = Start(Layout(placement, even_shares(placement, EXPERTS)), config)
    budget = BUDGET if way is by_boundary else 0
    return open_model_balancers(seat.accelerator, seat.fabric, made, starts, budget=budget, way=way)


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
    way: Way = by_boundary,
    models: Sequence[Given] = (TARGET, DRAFT),
    habit: Habit = PLAIN,
    **config: Any,
) -> list[Story]:
    """Serve on two ranks: a step of the first model, then the other's."""
    chosen = settings(**config)

    def program(seat: Seat) -> Story:
        run = Run(seat, open_all(seat, models, way, chosen), models, habit, range(seat.size))
        run.steps(0, STEPS)
        return run.end()

    return on_ranks(RANKS, program)


class Run:
    """One rank, from the first step to the last."""

    def __init__(
        self,
        seat: Seat,
        balancers: ModelBalancers,
        models: Sequence[Given],
        habit: Habit,
        ranks: Sequence[int],
        begun: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._seat = seat
        self._balancers = balancers
        self._models = models
        self._habit = habit
        self._place = list(ranks).index(seat.rank)
        self._lockstep = seat.fabric.open(f"lockstep{len(ranks)}", ranks)
        self._sights: deque[Sight] = deque()
        self._numbers = {given.name: count(begun.get(given.name, 0)) for given in models}
        compute = seat.accelerator.stream(Role.COMPUTE)
        self._streams = dict.fromkeys((given.name for given in models), compute)
        if habit.role is not Role.COMPUTE:
            self._streams["draft"] = seat.accelerator.stream(habit.role)
            balancers["draft"].attach(self._streams["draft"])

    def steps(self, first: int, last: int) -> None:
        """Of the first model; of the other, as is the habit."""
        for step in range(first, last):
            for place, given in enumerate(self._models):
                for _ in range(self._habit.drafts(step) if place else 1):
                    number = next(self._numbers[given.name])
                    self._step(given, number, LATER if step >= STEPS // 2 else HOT)

    def end(self) -> Story:
        """Close, and tell."""
        self._balancers.close()
        self._lockstep.barrier().result(30.0)
        return self._told()

    def _step(self, given: Given, step: int, rows: tuple[int, ...]) -> None:
        balancer, stream = self._balancers[given.name], self._streams[given.name]
        with balancer.step(step):
            for number in given.visits:
                with balancer.reading(number, step):
                    stream.launch(partial(self._look, balancer, number, step))
                self._habit.between(balancer, step)
            stream.launch(partial(self._count, balancer, rows))
        let_work(balancer)
        self._seat.accelerator.synchronize(30.0)
        self._lockstep.barrier().result(30.0)  # stands for the exchange of tokens

    def _look(self, balancer: ModelBalancer, number: int, step: int) -> None:
        self._sights.append(look(balancer, number, step, self._place))

    def _count(self, balancer: ModelBalancer, rows: tuple[int, ...]) -> None:
        for family in balancer.families:
            family.inner.load.counters += torch.tensor(rows, dtype=torch.int32)

    def _told(self) -> Story:
        every = [family for balancer in self._balancers for family in balancer.families]
        return Story(
            sights=tuple(self._sights),
            reports={
                balancer.model.name: tuple(
                    tuple(family.inner.engine.reports) for family in balancer.families
                )
                for balancer in self._balancers
            },
            aborts=sum(sum(family.inner.engine.aborts.values()) for family in every),
            staged=sum(f.berth.store.layout.staging * f.berth.family.slot_bytes for f in every),
            placements={b.model.name: b.layout.placement.tolist() for b in self._balancers},
        )


def look(balancer: ModelBalancer, number: int, step: int, rank: int) -> Sight:
    """What the slots of a layer hold, and what they should."""
    model = balancer.model
    row = model.layer(number)
    home = model.families[model.locate(row, 0).family]
    first = model.locate(row, 0).number
    held = tuple(
        tuple(sorted({byte for segment in slot for byte in segment.bytes.unique().tolist()}))
        for slot in home.slots[first : first + PER_RANK]
    )
    experts = balancer.layout.placement[row, rank * PER_RANK : (rank + 1) * PER_RANK].tolist()
    own = model.numbers[row]
    return Sight(model.name, step, number, held, tuple(mark(own, expert) for expert in experts))


def let_work(balancer: ModelBalancer) -> None:
    """Wait until what the engines have begun is through, as it is between real steps."""
    for family in balancer.families:
        engine = family.inner.engine
        assert isinstance(engine, ExpertEngine)
        staff = engine._staff
        through = [worker.start(one_call(lambda: None)) for worker in (staff.planner, staff.mover)]
        staff.go()
        for task in through:
            with suppress(TimeoutError):
                task.result(20.0)


def violations(stories: Sequence[Story]) -> list[str]:
    """Sights of slots that do not hold what the placement says, in words."""
    return [
        f"rank {rank}: {sight}"
        for rank, story in enumerate(stories)
        for sight in story.sights
        if sight.held != tuple((value,) for value in sight.promised)
    ]


def commits(story: Story, model: str) -> list[list[int]]:
    """By family: the boundaries at which an epoch was committed."""
    return [
        [report.step for report in reports if report.outcome == "committed"]
        for reports in story.reports[model]
    ]
