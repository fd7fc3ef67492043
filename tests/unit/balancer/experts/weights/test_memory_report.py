"""What balancing takes of a device's memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.ascend.lookup_tables import table_bytes
from equipoise.balancer.experts.placement import ExpertShape
from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.balancer.experts.weights.memory_report import (
    MemoryItem,
    MemoryReport,
    RoundOrder,
    memory_report,
    packed_slots,
    tables_bytes,
)
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal import registry as backends
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.kernels import Tables

RANKS = 3


def two_families() -> ExpertModel:
    registry = ModelRegistry("m", 2, 5)
    layers = [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3)]
    for number, weights in enumerate(layers):
        registry.register(number, w=weights)
    return registry.finalize([(str(number), weights) for number, weights in enumerate(layers)])


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_tables_bytes_equal_allocated_tables(
    layers: int, experts: int, ranks: int, spare: int
) -> None:
    slots = (-(-experts // ranks) + spare) * ranks
    tables = Tables.empty(layers, experts, slots, ranks, torch.device("cpu"))
    tensors = (tables.generation, tables.start, tables.replicas, tables.cumulative)
    expected = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert tables_bytes(ExpertShape(layers, experts, slots, ranks)) == expected


def test_model_report_lists_slots_staging_tables_and_counters() -> None:
    model = two_families()
    report = memory_report(model, RANKS, staging=[2, 5], slots_per_message=1)
    assert [entry.name for entry in report.items] == [
        "m: slots",
        "m: staging of layer group 0",
        "m: messages of layer group 0",
        "m: staging of layer group 1",
        "m: messages of layer group 1",
        "m: routing tables",
        "m: load counters",
    ]
    assert [entry.nbytes for entry in report.items] == [
        model.nbytes,
        2 * model.groups[0].slot_bytes,
        2 * model.groups[0].slot_bytes,
        5 * model.groups[1].slot_bytes,
        2 * model.groups[1].slot_bytes,
        tables_bytes(model.shape(RANKS)),
        3 * 5 * (4 + 8),
    ]
    assert report.total == sum(entry.nbytes or 0 for entry in report.items)
    assert "1 of 6 slots a layer, over all ranks, are spare" in report.items[0].reason


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9))
def test_packed_slots_cover_one_round_or_all_rounds(
    staging: int, slots: int, slots_per_message: int
) -> None:
    in_turn = packed_slots(staging, slots, slots_per_message, RoundOrder.IN_TURN)
    assert in_turn == (2 * min(slots, slots_per_message) if staging else 0)
    assert packed_slots(staging, slots, slots_per_message, RoundOrder.ALL_AT_ONCE) == 2 * staging


def test_rounds_are_in_turn_on_independent_groups() -> None:
    assert (
        RoundOrder.of_communicator(CommunicatorCapabilities(independent_groups=True))
        is RoundOrder.IN_TURN
    )
    assert RoundOrder.of_communicator(CommunicatorCapabilities()) is RoundOrder.ALL_AT_ONCE
    immediate = memory_report(
        two_families(), RANKS, [2, 5], slots_per_message=1, rounds=RoundOrder.ALL_AT_ONCE
    )
    messages_entry = {entry.name: entry for entry in immediate.items}[
        "m: messages of layer group 1"
    ]
    assert messages_entry.nbytes == 2 * 5 * two_families().groups[1].slot_bytes
    assert "at once" in messages_entry.reason


def test_model_report_counters_equal_allocation_of_load_window() -> None:
    shape = two_families().shape(RANKS)
    counters = torch.zeros((shape.layers, shape.experts), dtype=torch.int32)
    load_sum = torch.empty(counters.shape, dtype=torch.int64)
    report = memory_report(two_families(), RANKS, [2, 5], slots_per_message=1)
    assert report.items[-1].nbytes == counters.nbytes + load_sum.nbytes


def test_memory_report_counts_tables_of_backend_by_group() -> None:
    """Each family has tables of its own; the CPU's kernels look nothing up but these."""
    backend, shape = backends.accelerator("ascend"), two_families().shape(RANKS)
    plain = memory_report(two_families(), RANKS, [2, 5], slots_per_message=1)
    with_backend = memory_report(two_families(), RANKS, [2, 5], slots_per_message=1, device=backend)
    (own,) = set(with_backend.items) - set(plain.items)
    assert own.name == "m: routing tables of the backend"
    assert own.nbytes == sum(table_bytes(n, shape.experts, shape.slots) for n in (2, 1))
    assert with_backend.total == plain.total + own.nbytes
    cpu = backends.accelerator("cpu")
    assert memory_report(two_families(), RANKS, [2, 5], slots_per_message=1, device=cpu) == plain


def test_report_with_unknown_entry_prints_total_as_lower_bound() -> None:
    report = MemoryReport(
        (MemoryItem("slots", 1000, "own"), MemoryItem("links", None, "it does not say"))
    )
    assert report.total == 1000
    assert str(report).splitlines()[-2:] == [
        "links  unknown  it does not say",
        "total    1,000  at least",
    ]


def test_model_report_staging_equals_slot_store_staging() -> None:
    family = two_families().groups[0]
    store = backends.accelerator("cpu").open(0).slot_store(family.layout(staging=4))
    report = memory_report(two_families(), RANKS, staging=[4, 0], slots_per_message=16)
    assert report.items[1].nbytes == store.layout.staging * store.layout.slot_bytes


def test_model_report_requires_staging_for_every_layer_group() -> None:
    with pytest.raises(ValueError, match="1 numbers of staging for 2 layer groups"):
        memory_report(two_families(), RANKS, staging=[2], slots_per_message=16)


def test_reports_add_up_and_print_as_columns() -> None:
    one = MemoryReport((MemoryItem("slots", 1234567, "weights"),))
    both = one + MemoryReport((MemoryItem("communicator buffers", 89, "measured"),))
    assert both.total == one.total + 89
    assert str(both).splitlines() == [
        "what                      bytes  why",
        "slots                 1,234,567  weights",
        "communicator buffers         89  measured",
        "total                 1,234,656",
    ]


def test_report_entry_refuses_negative_bytes() -> None:
    with pytest.raises(ValueError, match="x cannot take -1 bytes"):
        MemoryItem("x", -1, "")
