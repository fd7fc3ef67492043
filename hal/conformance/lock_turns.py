"""Family *locks*: a mover's thread and a model's thread take turns at the slots."""

from dataclasses import dataclass
from functools import partial

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, Until, attempt, demand
from equipoise.hal.conformance.needs import (
    a_lock,
    all_of,
    copies_beside_launches,
    several_streams,
)
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role

SLOTS = 2
SLOT_BYTES = 8
MOST_TURNS = 4
MODEL, MOVER = 0, 1


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """Turn by turn, which slots the mover writes; the model reads all of them."""
    slots = st.sets(st.integers(0, SLOTS - 1), min_size=1).map(sorted)
    turns = st.lists(slots, min_size=1, max_size=MOST_TURNS)
    return turns.map(lambda drawn: program(step for slots in drawn for step in _turn(slots)))


def _turn(slots: list[int]) -> tuple[Step, Step]:
    return Step("write", tuple(slots), host=MOVER), Step("read", host=MODEL)


@dataclass
class _Scene:
    """What the two threads share.

    Attributes:
        weights: uint8 [SLOTS, SLOT_BYTES], 0 at first; turn k writes k + 1 into every byte.
        lock: between them.
        store: of these slots.
        launched: sections that the model has launched.
        signalled: turns that the mover has finished.
    """

    weights: Tensor
    lock: StreamLock
    store: SlotStore
    launched: int = 0
    signalled: int = 0

    def released(self, turns: int) -> bool:
        """Whether the model has launched so many releases."""
        return self.launched >= turns


def _scene(bench: Bench) -> _Scene:
    """The one that both threads see: whoever comes second drops what it has made."""
    weights = bench.filled((SLOTS, SLOT_BYTES), 0)
    layout = SlotLayout(tuple((Segment("weight", row),) for row in weights), staging=1)
    lock = bench.accelerator.stream_lock(bench.patience)
    mine = _Scene(weights, lock, bench.accelerator.slot_store(layout))
    scene: _Scene = bench.shared.setdefault("scene", mine)
    return scene


def _play(bench: Bench, found: Program) -> Play:
    scene = _scene(bench)
    yield NEXT
    if bench.host == MODEL:
        yield from _read(bench, found, scene)
    else:
        yield from _write(bench, found, scene)


def _write(bench: Bench, found: Program, scene: _Scene) -> Play:
    copy = bench.accelerator.stream(Role.COPY)
    for turn, step in enumerate(found.of(0, MOVER)):
        if turn:
            yield Until(partial(scene.released, turn), "the model's release")
            late = attempt(partial(scene.lock.wait, 0, bench.patience), StreamTimeout)
            demand("O5", not late, f"the release of turn {turn - 1} never wakes the mover")
        slots = [int(slot) for slot in step.args]
        page = bench.accelerator.pinned(SLOT_BYTES).fill_(turn + 1)
        scene.store.write(slots, [[page]] * len(slots), copy)
        yield NEXT
        late = attempt(partial(copy.synchronize, bench.patience), StreamTimeout)
        demand("L5", not late, "a copy from the host does not end while a launched stream waits")
        scene.lock.signal(0)
        scene.signalled += 1
        yield NEXT


def _read(bench: Bench, found: Program, scene: _Scene) -> Play:
    compute = bench.accelerator.stream(Role.COMPUTE)
    turns = len(found.of(0, MODEL))
    rows = bench.filled((turns, SLOTS, SLOT_BYTES), 0)
    for row in rows:
        scene.lock.acquire(compute)
        yield NEXT
        for half in (slice(None, SLOT_BYTES // 2), slice(SLOT_BYTES // 2, None)):
            compute.launch(partial(row[:, half].copy_, scene.weights[:, half]))
            bench.disturb(compute)
            yield NEXT
        scene.lock.release(compute)
        scene.launched += 1
        yield NEXT
    yield Until(lambda: scene.signalled == turns, "the mover's last signal")
    late = attempt(partial(compute.synchronize, bench.patience), StreamTimeout)
    demand("O5", not late, "the last signal never wakes the model")
    _judge(found, rows)


def _judge(found: Program, rows: Tensor) -> None:
    """Every section sees each slot as the latest turn up to its own has left it, whole."""
    due = [0] * SLOTS
    for turn, (step, row) in enumerate(zip(found.of(0, MOVER), rows.tolist(), strict=True)):
        for slot in step.args:
            due[int(slot)] = turn + 1
        for slot, (seen, wanted) in enumerate(zip(row, due, strict=True)):
            what = f"in turn {turn} slot {slot} reads as {seen}, not as {wanted} throughout"
            demand("O5", max(seen) <= wanted, f"the writer overtook a reader: {what}")
            demand("L7", min(seen) >= wanted, f"released onto what was not written yet: {what}")


TURNS = Property(
    name="the-mover-and-the-model-take-turns",
    family="locks",
    clauses=("O5", "L5", "L7"),
    claim="Each section between acquire and release sees the slots as one turn left them, whole.",
    programs=_programs,
    play=_play,
    needs=all_of(a_lock, copies_beside_launches, several_streams),
    hosts=2,
)
