"""What balancing takes of a device's memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.expert_model import ExpertModel
from equipoise.balancer.experts.ledger import Entry, Ledger, model_ledger, tables_bytes
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.registration import ModelRegistry
from equipoise.hal import registry as backends
from equipoise.hal.kernels import Tables

RANKS = 3


def two_families() -> ExpertModel:
    registry = ModelRegistry("m", 2, 5)
    layers = [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3)]
    for number, weights in enumerate(layers):
        registry.register(number, w=weights)
    return registry.finalize([(str(number), weights) for number, weights in enumerate(layers)])


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_tables_are_as_large_as_those_that_are_made(
    layers: int, experts: int, ranks: int, spare: int
) -> None:
    slots = (-(-experts // ranks) + spare) * ranks
    made = Tables.empty(layers, experts, slots, ranks, torch.device("cpu"))
    tensors = (made.generation, made.start, made.replicas, made.cumulative)
    wanted = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert tables_bytes(Shape(layers, experts, slots, ranks)) == wanted


def test_a_model_is_told_by_slots_staging_and_tables() -> None:
    model = two_families()
    ledger = model_ledger(model, RANKS, staging=[2, 5])
    assert [entry.what for entry in ledger.entries] == [
        "m: slots",
        "m: staging of family 0",
        "m: staging of family 1",
        "m: routing tables",
    ]
    assert [entry.nbytes for entry in ledger.entries] == [
        model.nbytes,
        2 * model.families[0].slot_bytes,
        5 * model.families[1].slot_bytes,
        tables_bytes(model.shape(RANKS)),
    ]
    assert ledger.total == sum(entry.nbytes or 0 for entry in ledger.entries)
    assert "1 of 6 slots a layer, over all ranks, are spare" in ledger.entries[0].why


def test_staging_is_as_large_as_what_a_slot_store_holds() -> None:
    family = two_families().families[0]
    store = backends.accelerator("cpu").open(0).slot_store(family.layout(staging=4))
    ledger = model_ledger(two_families(), RANKS, staging=[4, 0])
    assert ledger.entries[1].nbytes == store.layout.staging * store.layout.slot_bytes


def test_every_family_needs_its_number_of_staging_buffers() -> None:
    with pytest.raises(ValueError, match="1 numbers of staging for 2 families"):
        model_ledger(two_families(), RANKS, staging=[2])


def test_ledgers_add_up_and_are_printed_in_columns() -> None:
    one = Ledger((Entry("slots", 1234567, "weights"),))
    both = one + Ledger((Entry("communicator buffers", 89, "measured"),))
    assert both.total == one.total + 89
    assert str(both).splitlines() == [
        "what                      bytes  why",
        "slots                 1,234,567  weights",
        "communicator buffers         89  measured",
        "total                 1,234,656",
    ]


def test_no_memory_is_negative() -> None:
    with pytest.raises(ValueError, match="x cannot take -1 bytes"):
        Entry("x", -1, "")
