"""Clause P5: a mapping of tensors in flight."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.errors import LeaseEnded, ShapeClassError
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors


@dataclass
class Handle:
    """Fills a tensor when it is waited for, once; or raises."""

    log: list[str]
    name: str
    fill: Tensor | None = None
    error: Exception | None = None
    completed: bool = False

    def wait(self) -> None:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error
        if self.fill is not None:
            self.fill.fill_(7)

    def is_completed(self) -> bool:
        return self.completed


class Opaque:
    """A handle that can only be waited for, as some engines' are."""

    def wait(self) -> None:
        pass


@dataclass
class Lease:
    released: int = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class Sample:
    """A mapping with two handles and two post-processing callables, and what they did."""

    log: list[str] = field(default_factory=list)

    def mapping(self) -> AsyncIntermediateTensors:
        first = torch.zeros(3, 2)
        tensors = {"a": first, "b": torch.ones(3)}
        handles = [Handle(self.log, "wait 0", first), Handle(self.log, "wait 1")]
        steps = [lambda: self.log.append("post 0"), lambda: self.log.append("post 1")]
        return AsyncIntermediateTensors(tensors, handles, steps)


ONCE = ["wait 0", "wait 1", "post 0", "post 1"]
READS: dict[str, Callable[[AsyncIntermediateTensors], object]] = {
    "item": lambda it: it["a"],
    "tensors": lambda it: it.tensors,
    "slice": lambda it: it[0:2],
    "set": lambda it: it.__setitem__("c", torch.zeros(1)),
    "contains": lambda it: "a" in it,
    "length": len,
    "items": lambda it: it.items(),
    "equality": lambda it: it == it,
    "wait": lambda it: it.wait_for_comm(),
}


@given(st.lists(st.sampled_from(sorted(READS)), min_size=1, max_size=6))
def test_async_tensors_first_read_waits_and_post_processes_once(
    names: list[str],
) -> None:
    sample = Sample()
    mapping = sample.mapping()
    assert sample.log == []
    for name in names:
        READS[name](mapping)
        assert sample.log == ONCE
    assert mapping["a"].tolist() == [[7, 7]] * 3


@pytest.mark.parametrize("look", [repr, lambda it: it.ready(), lambda it: hash(it)])
def test_async_tensors_repr_ready_and_hash_do_not_wait(
    look: Callable[[AsyncIntermediateTensors], object],
) -> None:
    sample = Sample()
    look(sample.mapping())
    assert sample.log == []


@given(st.lists(st.sampled_from(sorted(READS)), min_size=2, max_size=5), st.integers(0, 3))
def test_async_tensors_failure_is_raised_by_every_read(names: list[str], place: int) -> None:
    log: list[str] = []
    error = RuntimeError("lost")

    def fail() -> None:
        log.append("post 0")
        raise error

    handles = [Handle(log, f"wait {n}", error=error if n == place else None) for n in range(3)]
    lease = Lease()
    mapping = AsyncIntermediateTensors({"a": torch.zeros(1)}, handles, [fail], lease=lease)
    for name in names:
        with pytest.raises(RuntimeError) as caught_error:
            READS[name](mapping)
        assert caught_error.value is error
    assert log == ["wait 0", "wait 1", "wait 2", "post 0"][: place + 1]
    assert mapping.ready()
    assert lease.released == 1


@pytest.mark.parametrize("handles", [None, []])
@pytest.mark.parametrize("postprocess", [None, []])
def test_async_tensors_are_ready_without_handles(
    handles: list[Handle] | None, postprocess: list[Callable[[], object]] | None
) -> None:
    mapping = AsyncIntermediateTensors({"a": torch.ones(2)}, handles, postprocess)
    assert mapping.ready()
    assert mapping["a"].tolist() == [1, 1]


def test_async_tensors_are_ready_when_all_handles_complete() -> None:
    handles = [Handle([], "0", completed=True), Handle([], "1")]
    mapping = AsyncIntermediateTensors({}, handles)
    assert not mapping.ready()
    handles[1].completed = True
    assert mapping.ready()
    assert not AsyncIntermediateTensors({}, [Opaque()]).ready()


def test_async_tensors_slice_is_ready_and_has_no_handles() -> None:
    sample = Sample()
    part = sample.mapping()[1:3]
    assert part["a"].tolist() == [[7, 7]] * 2
    assert part.ready()
    assert sample.log == ONCE


def test_async_tensors_concurrent_reads_wait_once() -> None:
    log: list[str] = []
    gate = threading.Event()
    data = torch.zeros(1)

    class Slow:
        def wait(self) -> None:
            log.append("wait")
            assert gate.wait(WATCHDOG)
            data.fill_(7)

    mapping = AsyncIntermediateTensors({"a": data}, [Slow()])
    reads: list[float] = []
    threads = [threading.Thread(target=lambda: reads.append(float(mapping["a"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(WATCHDOG)
    assert (log, reads) == (["wait"], [7.0] * 4)


def test_async_tensors_released_twice_end_lease_once_and_refuse_reads() -> None:
    lease = Lease()
    mapping = AsyncIntermediateTensors({"a": torch.zeros(1)}, lease=lease)
    mapping.release()
    mapping.release()
    for read in READS.values():
        with pytest.raises(LeaseEnded):
            read(mapping)
    assert lease.released == 1


def test_async_tensors_equal_only_with_equal_values() -> None:
    one = AsyncIntermediateTensors(_with_number(3))
    assert one == AsyncIntermediateTensors(_with_number(3))
    assert one != AsyncIntermediateTensors({**_with_number(3), "a": torch.zeros(2)})
    assert one != AsyncIntermediateTensors(_with_number(4))
    assert one != AsyncIntermediateTensors({"a": torch.ones(2)})
    assert one != {"a": torch.ones(2)}


def _with_number(number: int) -> dict[str, Any]:
    return {"a": torch.ones(2), "n": number}


class Stage(torch.nn.Module):
    """Reads what it is handed in every way that a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor, received: AsyncIntermediateTensors) -> Tensor:
        total = x @ self.weight + received["hidden"]
        for _, value in received.items():
            total = total + value
        return total * len(received) + received.tensors["residual"]


def on_their_way(rows: int, value: float, log: list[str]) -> AsyncIntermediateTensors:
    hidden, residual = torch.zeros(rows, 2), torch.zeros(rows, 2)

    class Filled:
        """Takes a lock and closes over tensors, as a real handle does."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def wait(self) -> None:
            with self._lock:
                log.append("wait")
                hidden.fill_(value)
                residual.fill_(10 * value)

    return AsyncIntermediateTensors({"hidden": hidden, "residual": residual}, [Filled()])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_async_tensors_work_in_full_graph_compiled_stage(backend: str) -> None:
    torch.compiler.reset()
    stage, log = Stage(), []  # type: ignore[var-annotated]
    compiled = torch.compile(stage, fullgraph=True, backend=backend)
    for step in range(4):
        rows = 2 + step // 2
        output = compiled(torch.ones(rows, 2), on_their_way(rows, float(step), log))
        assert torch.equal(output, stage(torch.ones(rows, 2), on_their_way(rows, float(step), [])))
        assert log == ["wait"] * (step + 1)


def test_compiled_stage_raises_error_of_async_tensors() -> None:
    torch.compiler.reset()
    compiled = torch.compile(Stage(), fullgraph=True, backend="eager")
    tensors = {"hidden": torch.zeros(2, 2), "residual": torch.zeros(2, 2)}
    failing = AsyncIntermediateTensors(dict(tensors), [Handle([], "0", error=RuntimeError("lost"))])
    with pytest.raises(RuntimeError, match="lost"):
        compiled(torch.ones(2, 2), failing)


def test_compiled_stage_sees_post_processing_of_same_shapes_only() -> None:
    torch.compiler.reset()
    compiled = torch.compile(Stage(), fullgraph=True, backend="eager")

    def make_input(replacement: Tensor) -> AsyncIntermediateTensors:
        tensors = {"hidden": torch.zeros(2, 2), "residual": torch.zeros(2, 2)}
        return AsyncIntermediateTensors(
            tensors,
            None,
            [lambda: tensors.__setitem__("hidden", replacement)],
        )

    expected = Stage()(torch.ones(2, 2), make_input(torch.full((2, 2), 3.0)))
    assert torch.equal(compiled(torch.ones(2, 2), make_input(torch.full((2, 2), 3.0))), expected)
    with pytest.raises(ShapeClassError, match="changed shapes"):
        compiled(torch.ones(2, 2), make_input(torch.zeros(4, 2)))
