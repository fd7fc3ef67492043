"""Broken kernels and slot operations of the device backends: mutations for all of them.

Each calls the operation that it is put in front of with other arguments, or adds a launch of its
own, so it needs nothing but the contract. CUDA's kernels are compiled, and cannot run over the
simulated driver: there only the slots are broken.
"""

from collections.abc import Iterator

from conformance.mutants import kernel_operands, kernels, large_kernels_and_slots
from conformance.mutants.mutation import Mutation, over
from devices.conformance.breakage import Breakage, Patch

from equipoise.backends.ascend import accelerator as ascend
from equipoise.backends.ascend.kernels import AscendKernels
from equipoise.backends.devices import accelerator as devices
from equipoise.backends.devices.slots import DeviceSlotStore

MUTATIONS: tuple[Mutation, ...] = (
    *kernels.MUTATIONS,
    *kernel_operands.MUTATIONS,
    *large_kernels_and_slots.MUTATIONS,
)


def ascend_breakages() -> Iterator[Breakage]:
    """Of Ascend's kernels, and of the slots of all devices."""
    return map(_breakage, MUTATIONS)


def cuda_breakages() -> Iterator[Breakage]:
    """Of the slots, whose bytes CUDA copies and sums in its own way."""
    return (_breakage(mutation) for mutation in MUTATIONS if mutation.slots)


def _breakage(mutation: Mutation) -> Breakage:
    def plant(patch: Patch) -> None:
        if mutation.kernels:
            patch(ascend, "AscendKernels", over(mutation.kernels, AscendKernels))
        if mutation.slots:
            patch(devices, "DeviceSlotStore", over(mutation.slots, DeviceSlotStore))

    return Breakage(
        name=mutation.name.replace("-", "_"),
        broken=mutation.broken,
        property=mutation.property,
        clause=mutation.clause,
        plant=plant,
    )
