"""One broken backend for each executor, by names that another process can import."""

from dataclasses import replace

from conformance.mutants.subjects import BrokenCpu, BrokenGloo, CpuParts
from conformance.mutants.visibility import OwnStreamStore
from torch import Tensor

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.backends.cpu.stream import CpuEvent
from equipoise.backends.virtual.backend import HEALTHY, VirtualBackend


class AlwaysReachedEvent(CpuEvent):
    """Says that its point is reached as soon as it was recorded (clause O7)."""

    def query(self) -> bool:
        """True, whatever the stream does."""
        return True


class ZeroingCommunicator(GlooCommunicator):
    """Sends zeros (clause S1, and all others of what arrives)."""

    def isend(self, tensor: Tensor, destination: int) -> GlooWork:
        """As many bytes, all of them 0."""
        return super().isend(tensor * 0, destination)


VIRTUAL = VirtualBackend(replace(HEALTHY, slots=OwnStreamStore))
CPU = BrokenCpu(CpuParts(event=AlwaysReachedEvent))
GLOO = BrokenGloo(ZeroingCommunicator)
