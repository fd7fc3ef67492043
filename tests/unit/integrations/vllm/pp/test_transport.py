"""`TensorDictTransport`: calls run in an ordered section, and sends are complete at once.

The modes that run both stages are in `test_handover.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.stream import Stream
from equipoise.integrations.vllm.pp.transport import (
    StreamOrderedHandle,
    TensorDictTransport,
    _open_slice_group,
)
from equipoise.pipeline.tensor_dict import TensorDictGroup

GIVEN = {"hidden": torch.zeros(2)}
CHOSEN = {"hidden": False}


class Turns:
    """Streams that count ordered sections, and know whether one is open."""

    compute_stream = cast(Stream, None)

    def __init__(self) -> None:
        self.open = self.count = 0

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        self.open += 1
        self.count += 1
        yield
        self.open -= 1

    def launch_in_forward(self, program: Any) -> None:
        raise AssertionError("nothing here is a part of the forward")


class Handle:
    """Handle of a message that is pending until `wait`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.within: list[int] = []

    def is_completed(self) -> bool:
        return bool(self.within)

    def wait(self) -> None:
        self.within.append(self._turns.open)


class Group:
    """Stands in for `TensorDictGroup`; records calls, and how many sections were open."""

    def __init__(self, turns: Turns, handles: int) -> None:
        self._turns = turns
        self.asked: list[tuple[Any, ...]] = []
        self.handles = [Handle(turns) for _ in range(handles)]

    def isend_tensor_dict(self, *given: Any) -> list[Handle]:
        self.asked.append((self._turns.open, *given))
        return self.handles

    def irecv_tensor_dict(self, *given: Any) -> tuple[Any, list[Handle], list[Any]]:
        self.asked.append((self._turns.open, *given))
        return GIVEN, self.handles, [len]


def between(handles: int = 2) -> tuple[TensorDictTransport, Group, Turns]:
    turns = Turns()
    group = Group(turns, handles)
    return TensorDictTransport(cast(TensorDictGroup, group), turns), group, turns


@given(st.none() | st.integers(0, 3), st.none() | st.integers(1, 4), st.integers(1, 3))
def test_handover_send_is_one_turn_and_is_completed_at_once(
    dst: int | None, ranks: int | None, handles: int
) -> None:
    ours, group, turns = between(handles)
    slices = None if ranks is None else SimpleNamespace(world_size=ranks)
    sent = ours.isend_tensor_dict(GIVEN, dst, slices, CHOSEN)
    [(open_turns, tensors, stage, sliced, chosen)] = group.asked
    assert (open_turns, turns.count, turns.open) == (1, 1, 0)
    assert (tensors is GIVEN, stage, chosen is CHOSEN) == (True, dst, True)
    assert (sliced is not None) == (ranks is not None and ranks > 1)
    assert len(sent) == handles
    assert all(cast(Any, one).is_completed() for one in sent)
    for one in sent:
        one.wait()
    assert not any(one.within for one in group.handles), "an engine waits, and must not for those"


@given(st.none() | st.integers(0, 3), st.integers(1, 3))
def test_handover_receive_and_each_wait_take_a_turn_of_their_own(
    src: int | None, handles: int
) -> None:
    ours, group, turns = between(handles)
    values, found, postprocess = ours.irecv_tensor_dict(src, SimpleNamespace(world_size=2))
    assert (group.asked, turns.count) == ([(1, src)], 1)
    assert values is GIVEN
    assert cast(Any, postprocess) == [len]
    assert len(found) == handles
    for number, one in enumerate(found, 2):
        assert not cast(Any, one).is_completed()
        one.wait()
        assert cast(Any, one).is_completed()
        assert (turns.count, turns.open) == (number, 0)
    assert [one.within for one in group.handles] == [[1]] * handles


def test_awaited_handle_without_query_is_not_completed() -> None:
    assert not StreamOrderedHandle(cast(Any, SimpleNamespace(wait=len)), Turns()).is_completed()


@pytest.mark.parametrize(("ranks", "opened"), [([3], 0), ([2, 3], 2), ([4, 5, 6, 7], 2)])
def test_handover_slices_need_several_ranks_in_a_stage(ranks: list[int], opened: int) -> None:
    asked: list[tuple[str, list[int]]] = []

    def communicator(name: str, among: list[int]) -> Any:
        asked.append((name, among))
        return SimpleNamespace(name=name)

    context: Any = SimpleNamespace(fabric=SimpleNamespace(open=communicator))
    found: Any = _open_slice_group(context, ranks)
    assert len({name for name, _ in asked}) == opened
    assert all(among == ranks for _, among in asked)
    assert (found is None) == (opened == 0)
    if found is not None:
        assert found.gather_communicator is not found.verify_communicator
