"""`SendingEnd` without a receiver: what it refuses, how it fails, and what it keeps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.hal import registry
from equipoise.hal.accelerator import open_for_rank
from equipoise.hal.errors import ChannelClosed, ChannelError, ShapeClassError
from equipoise.hal.stream import Role
from equipoise.pipeline.channel.edge import Edge
from equipoise.pipeline.channel.endpoints import ChannelSpec, Sender
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate
from equipoise.pipeline.channel.send import SendingEnd

TEMPLATE = SchemaTemplate(
    (RowField("hidden", (4,), torch.float32), RowField("residual", (4,), torch.float32)), max_rows=8
)


class CompletedSend:
    """A message that is gone as soon as it is sent."""

    def done(self) -> bool:
        return True

    def result(self, timeout: float) -> None:
        pass


class Line:
    """Keeps what is sent over it."""

    def __init__(self, capabilities: object) -> None:
        self.capabilities = capabilities
        self.sent: list[Tensor] = []
        self.is_down = False

    def isend(self, tensor: Tensor, peer: int) -> CompletedSend:
        if self.is_down:
            raise RuntimeError("the line is down")
        self.sent.append(tensor.clone())
        return CompletedSend()

    def close(self) -> None:
        pass


@contextmanager
def line(depth: int = 2) -> Iterator[tuple[Edge, Line]]:
    """An edge that leads nowhere."""
    accelerator = open_for_rank(registry.accelerator("cpu"), 0)
    network: Any = Line(registry.communicator("gloo").capabilities)
    yield (
        Edge(
            name="nowhere",
            communicator=network,
            peer=1,
            accelerator=accelerator,
            stream=accelerator.stream(Role.COMPUTE),
            deadline=WATCHDOG,
            depth=depth,
        ),
        network,
    )
    accelerator.close()


def sender(edge: Edge) -> Sender:
    """Of `TEMPLATE`."""
    return Sender(
        ChannelSpec(name="nowhere", source=0, destination=1, template=TEMPLATE, depth=edge.depth),
        edge,
    )


def tensors(rows: int, value: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full((rows, 4), value) for name in ("hidden", "residual")}


def test_sender_refuses_non_tensor_and_sends_next_step() -> None:
    with line() as (edge, network):
        end, invalid_message = sender(edge), dict[str, Any](hidden=[1.0], residual=None)
        with pytest.raises(ShapeClassError, match="hidden"):
            end.send(invalid_message)
        end.send(tensors(2))
        end.drain()
        assert [message.numel() for message in network.sent] == [64 + 2 * 64]


def test_sender_refuses_lent_tensors_out_of_place() -> None:
    with line() as (edge, network):
        end = sender(edge)
        outputs = end.borrow_outputs(8)
        with pytest.raises(ShapeClassError, match="not in its place"):
            end.send({name: tensor[:2] for name, tensor in outputs.items()})
        with pytest.raises(ShapeClassError, match="not in its place"):
            end.send({"hidden": outputs["residual"], "residual": outputs["hidden"]})
        for number, tensor in enumerate(outputs.values()):
            tensor.fill_(number)
        end.send(outputs).wait()
        payload = network.sent[0][64:].view(torch.float32)
        assert payload.tolist() == [0.0] * 32 + [1.0] * 32


def test_sender_packs_other_tensors_in_place_of_lent_ones() -> None:
    with line() as (edge, network):
        end = sender(edge)
        outputs = end.borrow_outputs(2)
        outputs["hidden"].fill_(7.0)
        end.send({"hidden": outputs["hidden"], "residual": torch.full((2, 4), 8.0)}).wait()
        assert network.sent[0][64:].view(torch.float32)[:8].tolist() == [7.0] * 8
        assert network.sent[0][128:].view(torch.float32)[:8].tolist() == [8.0] * 8


def test_sending_end_sends_larger_step_than_the_lent_one() -> None:
    with line() as (edge, network):
        end = SendingEnd(edge)
        small, large = TEMPLATE.schema_for(1), TEMPLATE.schema_for(8)
        outputs = end.borrow_outputs(small)
        end.send(tensors(8, 3.0), large).wait()
        assert network.sent[0][64:].view(torch.float32).tolist() == [3.0] * 64
        assert outputs["hidden"].shape == (1, 4)


def test_sending_end_is_unchanged_after_allocation_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with line() as (edge, network):
        end, schema = SendingEnd(edge), TEMPLATE.schema_for(8)

        def raise_memory_error(*_: object, **__: object) -> Tensor:
            raise MemoryError("none is left")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", raise_memory_error)
            with pytest.raises(MemoryError):
                end.send(tensors(8), schema)
        end.send(tensors(8), schema).wait()
        [message] = network.sent
        assert int(message[:64].view(torch.int64)[1]) == 0, "it is message 0"


def test_sender_program_error_fails_message_but_not_stream() -> None:
    with line() as (edge, network):
        end = sender(edge)
        network.is_down = True
        departure = end.send(tensors(2))
        with pytest.raises(ChannelError, match="the line is down"):
            departure.wait()
        assert departure.is_completed()
        log: list[int] = []
        edge.stream.launch(lambda: log.append(1))
        edge.stream.synchronize(WATCHDOG)
        assert log == [1]
        with pytest.raises(ChannelError, match="the line is down"):
            end.drain()


def test_sender_closes_when_interrupted_amid_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with line() as (edge, _):
        end = sender(edge)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(type(edge.stream), "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            end.send(tensors(1))
        monkeypatch.undo()
        with pytest.raises(ChannelClosed, match="KeyboardInterrupt"):
            end.send(tensors(1))
