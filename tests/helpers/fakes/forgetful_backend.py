"""Accelerators named as PACKAGE:OBJECT on the command line, each with one thing broken."""

from collections.abc import Sequence

from equipoise.backends.cpu.accelerator import CpuAccelerator, CpuBackend
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Stream


class ForgetfulStore(CpuSlotStore):
    """Leaves out one copy of every commit."""

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        super().commit(copies[1:], stream)


class ForgetfulAccelerator(CpuAccelerator):
    """A CPU whose slot store forgets."""

    def slot_store(self, layout: SlotLayout) -> CpuSlotStore:
        return ForgetfulStore(layout)


class ForgetfulBackend(CpuBackend):
    """Opens it."""

    name = "forgetful"

    def open(self, index: int) -> CpuAccelerator:
        return ForgetfulAccelerator()


FORGETFUL = ForgetfulBackend()
