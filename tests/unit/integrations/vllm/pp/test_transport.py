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

TENSORS = {"hidden": torch.zeros(2)}
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
        self.calls: list[tuple[Any, ...]] = []
        self.handles = [Handle(turns) for _ in range(handles)]

    def isend_tensor_dict(self, *arguments: Any) -> list[Handle]:
        self.calls.append((self._turns.open, *arguments))
        return self.handles

    def irecv_tensor_dict(self, *arguments: Any) -> tuple[Any, list[Handle], list[Any]]:
        self.calls.append((self._turns.open, *arguments))
        return TENSORS, self.handles, [len]


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
    send_handles = ours.isend_tensor_dict(TENSORS, dst, slices, CHOSEN)
    [(open_turns, tensors, stage, slice_group, chosen)] = group.calls
    assert (open_turns, turns.count, turns.open) == (1, 1, 0)
    assert (tensors is TENSORS, stage, chosen is CHOSEN) == (True, dst, True)
    assert (slice_group is not None) == (ranks is not None and ranks > 1)
    assert len(send_handles) == handles
    assert all(cast(Any, one).is_completed() for one in send_handles)
    for one in send_handles:
        one.wait()
    assert not any(one.within for one in group.handles), "an engine waits, and must not for those"


@given(st.none() | st.integers(0, 3), st.integers(1, 3))
def test_handover_receive_and_each_wait_take_a_turn_of_their_own(
    src: int | None, handles: int
) -> None:
    ours, group, turns = between(handles)
    values, receive_handles, postprocess = ours.irecv_tensor_dict(
        src, SimpleNamespace(world_size=2)
    )
    assert (group.calls, turns.count) == ([(1, src)], 1)
    assert values is TENSORS
    assert cast(Any, postprocess) == [len]
    assert len(receive_handles) == handles
    for number, one in enumerate(receive_handles, 2):
        assert not cast(Any, one).is_completed()
        one.wait()
        assert cast(Any, one).is_completed()
        assert (turns.count, turns.open) == (number, 0)
    assert [one.within for one in group.handles] == [[1]] * handles


def test_awaited_handle_without_query_is_not_completed() -> None:
    assert not StreamOrderedHandle(cast(Any, SimpleNamespace(wait=len)), Turns()).is_completed()


@pytest.mark.parametrize(("ranks", "group_count"), [([3], 0), ([2, 3], 2), ([4, 5, 6, 7], 2)])
def test_handover_slices_need_several_ranks_in_a_stage(ranks: list[int], group_count: int) -> None:
    groups: list[tuple[str, list[int]]] = []

    def communicator(name: str, among: list[int]) -> Any:
        groups.append((name, among))
        return SimpleNamespace(name=name)

    context: Any = SimpleNamespace(fabric=SimpleNamespace(open=communicator))
    slice_group: Any = _open_slice_group(context, ranks)
    assert len({name for name, _ in groups}) == group_count
    assert all(among == ranks for _, among in groups)
    assert (slice_group is None) == (group_count == 0)
    if slice_group is not None:
        assert slice_group.gather_communicator is not slice_group.verify_communicator
