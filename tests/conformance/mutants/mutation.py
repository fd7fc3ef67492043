"""Breakages made of the contract's own calls, which fit the kernels or slots of any backend."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import cpu_with, device_with

from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.backends.cpu.slots import CpuSlotStore
from equipoise.backends.virtual.kernels import VirtualKernels

if TYPE_CHECKING:
    AnyKernels = CpuKernels
    AnySlots = CpuSlotStore
else:
    # A mutation is put in front of a backend's own class (`over`), and `super()` is that class.
    AnyKernels = AnySlots = object


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One broken behaviour of kernels or of slots, and the property that must notice it.

    Attributes:
        name: words with hyphens, unique.
        clause: the clause that it breaks.
        broken: one sentence: what it does instead.
        property: the property that must reject it.
        kernels: mixed into a backend's kernels; None where `slots` is set.
        slots: mixed into a backend's slot store; None where `kernels` is set.
        also: other properties that cannot help rejecting it, as in `Mutant`.
    """

    name: str
    clause: str
    broken: str
    property: str
    kernels: type | None = None
    slots: type | None = None
    also: tuple[str, ...] = ()

    def on_cpu(self) -> Mutant:
        """The CPU, broken by it."""
        parts = {}
        if self.kernels:
            parts["kernels"] = over(self.kernels, CpuKernels)
        if self.slots:
            parts["slots"] = over(self.slots, CpuSlotStore)
        return Mutant(**self._words(), subject=cpu_with(**parts), real=True)

    def on_virtual(self) -> Mutant:
        """The virtual device, its kernels broken by it."""
        assert self.kernels is not None
        subject = device_with(kernels=over(self.kernels, VirtualKernels))
        return Mutant(**self._words(), subject=subject)

    def _words(self) -> dict[str, Any]:
        names = ("name", "clause", "broken", "property", "also")
        return {name: getattr(self, name) for name in names}


def over(mutation: type, healthy: type) -> type:
    """A backend's class with the methods of the mutation before its own."""
    return type(mutation.__name__, (mutation, healthy), {})
