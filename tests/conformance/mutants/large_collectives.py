"""Mutants of gloo that are right for small messages, and for few of them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import gloo_with
from torch import Tensor

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.hal.communicator import Exchange, PeerBuffer

MEGABYTE = 1 << 20


class SumsOneBlock(GlooCommunicator):
    """Elements after the first 65536 are not summed."""

    def all_reduce(self, tensor: Tensor) -> GlooWork:
        return super().all_reduce(tensor.view(-1)[: 1 << 16] if tensor.numel() else tensor)


class ScatterLacksLastElement(GlooCommunicator):
    """Of a sum of more than 65536 elements the last one is left out."""

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> GlooWork:
        if out.numel() <= 1 << 16:
            return super().reduce_scatter(out, tensor)
        parts = tensor.view(self.size, -1)[:, :-1].contiguous()
        return super().reduce_scatter(out.view(-1)[:-1], parts)


class GatherLacksLastByte(GlooCommunicator):
    """Gathering more than a megabyte loses the last byte of each part."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> GlooWork:
        operand = tensor
        if tensor.nbytes > MEGABYTE:
            operand = tensor.clone()
            operand.view(-1)[-1] = 0
        return super().all_gather(out, operand)


class BroadcastsWholeKilobytes(GlooCommunicator):
    """A broadcast of more than 64 KiB ends with whole kilobytes."""

    def broadcast(self, tensor: Tensor, source: int) -> GlooWork:
        flat = tensor.view(-1)
        if tensor.nbytes > 1 << 16:
            flat = flat[: flat.numel() // 1024 * 1024]
        return super().broadcast(flat, source)


class SwapsLargeBlocks(GlooCommunicator):
    """Blocks of more than a megabyte go to the wrong place."""

    def all_to_all(self, out: Tensor, tensor: Tensor) -> GlooWork:
        operand = tensor.flip(0) if tensor[0].nbytes > MEGABYTE else tensor
        return super().all_to_all(out, operand)


class RepeatsFirstRow(GlooCommunicator):
    """Rows after the first 4096 of a block hold the contents of the first."""

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> GlooWork:
        operand = tensor.clone()
        operand[4096:] = operand[:1]
        return super().all_to_all_uneven(out, operand, receives, sends)


class SendsOneMegabyte(GlooCommunicator):
    """A message of more than a megabyte is cut off after it."""

    def isend(self, tensor: Tensor, destination: int) -> GlooWork:
        operand = tensor.clone()
        operand.view(-1)[MEGABYTE:] = 0
        return super().isend(operand, destination)


class ShiftsLargeBlobs(GlooCommunicator):
    """A blob of more than 4 MiB begins with its second byte."""

    def exchange(self, round: Exchange) -> GlooWork:
        sends = tuple(
            PeerBuffer(p.peer, torch.roll(p.blob, -1) if p.blob.nbytes > 4 * MEGABYTE else p.blob)
            for p in round.sends
        )
        return super().exchange(replace(round, sends=sends))


class LosesMessage100(GlooCommunicator):
    """Message 100 to a rank arrives as zeros."""

    send_count = 0

    def isend(self, tensor: Tensor, destination: int) -> GlooWork:
        self.send_count += 1
        return super().isend(tensor * 0 if self.send_count == 100 else tensor, destination)


COLLECTIVES = "collectives-equal-their-definitions-at-any-size"
MESSAGES = "long-messages-arrive-whole"
MUTANTS = (
    Mutant(
        name="sums-end-with-a-block",
        clause="X4",
        broken="An all-reduce of more than 65536 elements leaves the others as they are.",
        property=COLLECTIVES,
        subject=gloo_with(communicator=SumsOneBlock),
        real=True,
    ),
    Mutant(
        name="long-scatters-lack-the-last-element",
        clause="X4",
        broken="A reduce-scatter of more than 65536 elements leaves out the last.",
        property=COLLECTIVES,
        subject=gloo_with(communicator=ScatterLacksLastElement),
        real=True,
    ),
    Mutant(
        name="long-gathers-lose-their-last-byte",
        clause="X4",
        broken="An all-gather of more than a megabyte loses a byte of each rank's.",
        property=COLLECTIVES,
        subject=gloo_with(communicator=GatherLacksLastByte),
        real=True,
    ),
    Mutant(
        name="long-broadcasts-end-with-whole-kilobytes",
        clause="X4",
        broken="A broadcast of more than 64 KiB ends with whole kilobytes.",
        property=COLLECTIVES,
        subject=gloo_with(communicator=BroadcastsWholeKilobytes),
        real=True,
    ),
    Mutant(
        name="long-blocks-go-to-the-wrong-rank",
        clause="X4",
        broken="An all-to-all of blocks of more than a megabyte turns their order round.",
        property=COLLECTIVES,
        subject=gloo_with(communicator=SwapsLargeBlocks),
        real=True,
    ),
    Mutant(
        name="rows-are-counted-in-twelve-bits",
        clause="S3",
        broken="Rows behind the first 4096 are copies of the first.",
        property="thousands-of-uneven-rows-arrive",
        subject=gloo_with(communicator=RepeatsFirstRow),
        real=True,
    ),
    Mutant(
        name="a-message-ends-with-a-megabyte",
        clause="S1",
        broken="Bytes of a message behind the first megabyte are zeros.",
        property=MESSAGES,
        subject=gloo_with(communicator=SendsOneMegabyte),
        real=True,
    ),
    Mutant(
        name="a-long-blob-is-shifted",
        clause="S1",
        broken="A blob of more than 4 MiB arrives turned by one byte.",
        property=MESSAGES,
        subject=gloo_with(communicator=ShiftsLargeBlobs),
        real=True,
    ),
    Mutant(
        name="the-hundredth-message-is-lost",
        clause="P2",
        broken="Of many messages in flight the hundredth arrives as zeros.",
        property="many-messages-in-flight-match-in-order",
        subject=gloo_with(communicator=LosesMessage100),
        real=True,
    ),
)
