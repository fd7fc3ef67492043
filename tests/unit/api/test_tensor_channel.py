"""`TensorChannel`: steps arrive as they were sent, and each end refuses the other's part."""

from typing import Any

import pytest
import torch
from helpers.processes.thread_ranks import GroupMember, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise
from equipoise.connection import Connection
from equipoise.hal.errors import ChannelError, ShapeClassError


def channel(rows: int = 8, name: str = "edge") -> equipoise.TensorChannel:
    return equipoise.TensorChannel(
        name=name,
        source=0,
        destination=1,
        tensors={"hidden": ((4,), torch.bfloat16), "flag": ((), torch.int32)},
        rows=rows,
    )


@settings(max_examples=5)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=9))
def test_tensors_of_every_step_arrive_as_sent(steps: list[int]) -> None:
    def tensors(step: int, rows: int) -> dict[str, torch.Tensor]:
        hidden = torch.full((rows, 4), step + 0.5, dtype=torch.bfloat16)
        return {"hidden": hidden, "flag": torch.arange(rows, dtype=torch.int32)}

    def program(member: GroupMember) -> None:
        ranks = Connection(member.accelerator, member.fabric, 20.0)
        if member.rank == 0:
            sender = channel().sender(ranks)
            for step, rows in enumerate(steps):
                message = tensors(step, rows)
                ranks.compute.launch(lambda message=message: sender.send(message))  # type: ignore[misc]
            ranks.compute.synchronize(20.0)
            sender.drain()
            sender.close()
            return
        receiver = channel().receiver(ranks)
        for step, rows in enumerate(steps):
            receiver.expect(rows)
            received = receiver.receive()
            assert isinstance(received, equipoise.AsyncIntermediateTensors)
            for name, expected in tensors(step, rows).items():
                assert torch.equal(received[name], expected)
            received.release()
        receiver.close()

    on_ranks(2, program)


def test_wrong_end_of_channel_is_refused_before_anything_opens() -> None:
    def program(member: GroupMember) -> Any:
        ranks, plan = Connection(member.accelerator, member.fabric, 20.0), channel()
        open_wrong_end = plan.receiver if member.rank == 0 else plan.sender
        with pytest.raises(ChannelError, match="edge: rank") as error:
            open_wrong_end(ranks)
        return str(error.value)

    assert on_ranks(2, program) == [
        "edge: rank 1 receives, not rank 0",
        "edge: rank 0 sends, not rank 1",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"rows": 2.5}, "rows must be a whole number, got 2.5"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"source": -1}, "source must be at least 0, got -1"),
        ({"source": 1}, "source and destination are both rank 1"),
        ({"tensors": {}}, "tensors must map names to shape and dtype, got {}"),
        ({"tensors": {"x": [4]}}, "tensors: 'x' must be (shape, dtype), got [4]"),
        (
            {"tensors": {"x": ([4], "int8")}},
            "tensors: 'x': dtype must be a torch.dtype, got 'int",
        ),
        ({"tensors": {"x": (4, torch.int8)}}, "tensors: 'x': shape must be that of one row, got 4"),
        ({"tensors": {"x": ([-1], torch.int8)}}, "tensors: 'x': shape must be at least 0, got -1"),
        ({"tensors": {3: ([1], torch.int8)}}, "tensors: a name must be a text, got 3"),
        ({"name": None}, "name must be a text, got None"),
    ],
)
def test_channel_refuses_bad_description_when_made(fields: dict[str, Any], message: str) -> None:
    tensors = {"x": ([4], torch.int8)}
    valid: dict[str, Any] = {"name": "edge", "source": 0, "destination": 1, "tensors": tensors}
    with pytest.raises(ChannelError) as error:
        equipoise.TensorChannel(**{"rows": 8} | valid | fields)
    assert str(error.value).removeprefix("edge: ").startswith(message)


def test_channel_to_rank_beyond_the_run_is_refused() -> None:
    plan = equipoise.TensorChannel(
        name="edge", source=0, destination=7, tensors={"x": ((), torch.int8)}, rows=1
    )
    with equipoise.connect() as ranks, pytest.raises(ChannelError) as error:
        plan.sender(ranks)
    assert str(error.value) == "edge: destination is rank 7, there are 1 ranks"


def test_ends_that_say_other_rows_are_refused_on_both() -> None:
    def program(member: GroupMember) -> None:
        ranks = Connection(member.accelerator, member.fabric, 20.0)
        end = channel(rows=8).sender if member.rank == 0 else channel(rows=9).receiver
        with pytest.raises(ShapeClassError):
            end(ranks)

    on_ranks(2, program)
