"""Mutants of family *overlap*."""

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with

from equipoise.backends.virtual.device import VirtualDevice
from equipoise.backends.virtual.stream import VirtualStream
from equipoise.hal.stream import Role


class SharingDevice(VirtualDevice):
    """The pool of native queues is one short: two roles share one."""

    def stream(self, role: Role) -> VirtualStream:
        if role is Role.AUX and role not in self._streams:
            queue = super().stream(Role.COMM)._queue
            self._streams[role] = self.parts.stream(role, self, queue)
        return super().stream(role)


BESIDE = "other-streams-run-while-one-waits-for-a-signal"
MUTANTS = (
    Mutant(
        name="two-roles-share-a-queue",
        clause="B8",
        broken="Four streams are declared, and two of them alias, as both vendors' pools do.",
        property="declared-streams-run-side-by-side",
        subject=device_with(device=SharingDevice),
        # A stream that waits for a signal is blocked like a held one.
        also=(BESIDE,),
    ),
)
