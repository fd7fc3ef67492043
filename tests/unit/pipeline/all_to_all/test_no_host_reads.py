"""Nothing that packs or unpacks looks at a value: it runs on tensors that have none."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from exploration.exchange.case import PLAIN
from exploration.exchange.in_process_wire import Table, TableWire
from torch import Tensor

from equipoise.hal.stream import Event, Role
from equipoise.pipeline.all_to_all.formats import Batch
from equipoise.pipeline.all_to_all.kernels import BufferSet
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels
from equipoise.pipeline.all_to_all.transport import active_mask

META = torch.device("meta")
FORM = replace(PLAIN, steps=[[[[[0, 1]] * 4, [], []]]]).form()


class Inline:
    """A stream that runs everything at once."""

    role = Role.COMPUTE

    def current(self) -> "nullcontext[None]":
        return nullcontext()

    def launch(self, program: Callable[[], object]) -> None:
        program()

    def record(self, event: Event) -> None:
        raise NotImplementedError

    def wait(self, event: Event) -> None:
        raise NotImplementedError

    def synchronize(self, timeout: float) -> None:
        raise NotImplementedError


class Curious(TorchKernels):
    """Asks whether there is anything to send."""

    def _pack_rows(self, batch: Batch, buffer_set: BufferSet) -> None:
        if int((batch.slots < self._form.num_slots).sum()):
            super()._pack_rows(batch, buffer_set)


def run(make: type[TorchKernels], tokens: int) -> BufferSet:
    """All four programs, one after another."""
    kernels, stream = make(FORM, TableWire(Table(3), 0), _without_values), Inline()
    batch = Batch(
        torch.empty(tokens, FORM.top_k, dtype=torch.int32, device=META),
        tuple(torch.empty(tokens, *r.shape, dtype=r.dtype, device=META) for r in FORM.payloads),
        torch.empty(1, dtype=torch.int64, device=META),
        torch.empty(FORM.experts, dtype=torch.int32, device=META),
    )
    buffer_set = kernels.buffer_sets[0]
    kernels.pack_rows(batch, buffer_set, stream)
    kernels.unpack_rows(buffer_set, stream)
    for number in range(len(FORM.payloads)):
        assert buffer_set.received.gather_payload(number).shape[0] == FORM.max_entries
    rows = torch.empty(FORM.max_entries, *FORM.result.shape, dtype=FORM.result.dtype, device=META)
    kernels.pack_results(rows, buffer_set, stream)
    kernels.unpack_results(tokens, buffer_set, stream)
    return buffer_set


def _without_values(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=META)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_exchange_kernels_run_on_meta_tensors(tokens: int) -> None:
    buffer_set = run(TorchKernels, tokens)
    assert buffer_set.results.device == META
    assert active_mask(TableWire(Table(3), 0), META).device == META


def test_exchange_kernels_that_read_values_are_rejected() -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        run(Curious, 4)
