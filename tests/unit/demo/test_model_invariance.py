"""A row's bits depend on its request alone."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.demo.model import (
    Batch,
    Decoder,
    KVCache,
    LocalExperts,
    ModelConfig,
    Sequence,
    combine_in_order,
    expert_rows,
    group_by_expert,
    invariance,
    random_weights,
    rows,
)
from equipoise.demo.model.invariance import (
    NotBatchInvariant,
    RowProbe,
    check_batch_invariance,
    check_probes,
    probes,
)
from equipoise.demo.model.layers import top_in_order

CONFIG = ModelConfig(layers=2)
SLOTS = 24
# A forward costs ten times what an ordinary example does.
FEW = settings(max_examples=max(40, settings().max_examples // 20))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model() -> tuple[Decoder, LocalExperts]:
    weights = random_weights(CONFIG, seed=7)
    return Decoder(weights), LocalExperts(weights)


def forward(batch: Batch, store: KVCache) -> Tensor:
    decoder, experts = model()
    return decoder.forward(batch, store, experts)


@cache
def text(seed: int, length: int) -> Tensor:
    return torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def logits_alone(seed: int, length: int) -> Tensor:
    """Logits of a prompt that is served by itself in a fresh cache."""
    return forward(Batch((Sequence(0, text(seed, length), 0),)), KVCache(CONFIG, 1))


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=SLOTS // 3)


@pytest.mark.slow
@FEW
@given(lengths, st.randoms(use_true_random=False), st.integers(1, 4))
def test_prompt_logits_are_independent_of_batch(
    sizes: list[int], chance: Random, cuts: int
) -> None:
    slots = list(range(SLOTS))
    chance.shuffle(slots)
    order = list(enumerate(sizes))
    chance.shuffle(order)
    store = KVCache(CONFIG, SLOTS)
    for part in (order[i::cuts] for i in range(cuts)):
        batch = Batch(tuple(Sequence(slots[seed], text(seed, n), 0) for seed, n in part))
        rows = torch.split(forward(batch, store), [n for _, n in part])
        for (seed, n), logits in zip(part, rows, strict=True):
            assert torch.equal(logits, logits_alone(seed, n))


@pytest.mark.slow
@FEW
@given(st.data(), st.integers(1, SLOTS - 2))
def test_decode_logits_are_independent_of_group_size(data: st.DataObject, requests: int) -> None:
    slots = data.draw(st.permutations(range(SLOTS)))[:requests]
    sizes = {slot: data.draw(st.integers(1, 20)) for slot in slots}
    store = KVCache(CONFIG, SLOTS)
    forward(Batch(tuple(Sequence(s, text(s, 24)[: sizes[s]], 0) for s in slots)), store)
    group = data.draw(st.permutations(slots))[: data.draw(st.integers(1, requests))]
    newcomer = next(slot for slot in range(SLOTS) if slot not in slots)
    batch = Batch(
        (Sequence(newcomer, text(newcomer, 9), 0),),
        tuple(Sequence(s, text(s, 24)[sizes[s] : sizes[s] + 1], sizes[s]) for s in group),
    )
    logits = forward(batch, store)
    assert torch.equal(logits[:9], logits_alone(newcomer, 9))
    for row, slot in zip(logits[9:], group, strict=True):
        assert torch.equal(row, logits_alone(slot, 24)[sizes[slot]])


@FEW
@given(st.lists(st.integers(1, 23), unique=True, max_size=5))
def test_chunked_prompt_has_logits_of_whole_prompt(cuts: list[int]) -> None:
    store = KVCache(CONFIG, 1)
    bounds = [0, *sorted(cuts), 24]
    pieces = [Sequence(0, text(3, 24)[start:stop], start) for start, stop in pairwise(bounds)]
    logits = [
        forward(Batch((), (p,)) if len(p.tokens) == 1 else Batch((p,)), store) for p in pieces
    ]
    assert torch.equal(torch.cat(logits), logits_alone(3, 24))


def test_kv_cache_slot_reuse_changes_no_logits() -> None:
    store = KVCache(CONFIG, SLOTS)
    forward(Batch(tuple(Sequence(slot, text(50 + slot, 160), 0) for slot in range(8))), store)
    logits = forward(Batch((Sequence(5, text(1, 30), 0),)), store)
    assert torch.equal(logits, logits_alone(1, 30))
    more = forward(Batch((), (Sequence(5, text(2, 1), 30),)), store)
    fresh = KVCache(CONFIG, 1)
    forward(Batch((Sequence(0, text(1, 30), 0),)), fresh)
    assert torch.equal(more, forward(Batch((), (Sequence(0, text(2, 1), 30),)), fresh))


def test_logits_are_causal() -> None:
    other_tokens = text(3, 24).clone()
    other_tokens[10] = other_tokens[10] % 255 + 1
    logits = forward(Batch((Sequence(0, other_tokens, 0),)), KVCache(CONFIG, 1))
    same = (logits == logits_alone(3, 24)).all(dim=-1)
    assert same.tolist() == [True] * 10 + [False] * 14


def test_decoder_calls_every_layer_for_empty_batch() -> None:
    calls = []

    def experts(layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        calls.append((layer, tuple(x.shape), tuple(expert_ids.shape), expert_ids.dtype))
        return x

    logits = model()[0].forward(Batch(), KVCache(CONFIG, 1), experts)
    assert logits.shape == (0, 256)
    assert calls == [(layer, (0, 128), (0, 4), torch.int32) for layer in range(CONFIG.layers)]


@FEW
@given(st.integers(1, 300), st.data())
def test_expert_row_bits_are_independent_of_other_rows(rows: int, data: st.DataObject) -> None:
    weights = random_weights(CONFIG, seed=7)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
    row = data.draw(st.integers(0, rows - 1))
    gate_up, down = weights.gate_up[1, 5], weights.down[1, 5]
    single = expert_rows(x[row : row + 1], gate_up, down)
    assert torch.equal(single[0], expert_rows(x, gate_up, down)[row])


def test_combine_sums_experts_in_top_k_order() -> None:
    rows = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]).view(1, 4, 1)
    assert combine_in_order(rows, torch.ones(1, 4)).item() == 0.0
    assert combine_in_order(rows[:, [0, 3, 1, 2]], torch.ones(1, 4)).item() == 2.0


@FEW
@given(st.lists(st.integers(0, 5), max_size=40))
def test_group_by_expert_keeps_row_order(ids: list[int]) -> None:
    expert_ids = ids[: len(ids) // 2 * 2]
    order, bounds = group_by_expert(torch.tensor(expert_ids, dtype=torch.int32).view(-1, 2), 6)
    groups = [order[start:stop].tolist() for start, stop in pairwise(bounds)]
    assert groups == [[i for i, e in enumerate(expert_ids) if e == expert] for expert in range(6)]


def test_top_in_order_breaks_ties_by_lower_expert() -> None:
    values = torch.tensor([[0.1, 0.3, 0.2, 0.3, 0.2, 0.2]]).repeat(8, 1)
    _, ids = top_in_order(values, 4)
    assert ids.tolist() == [[1, 3, 2, 4]] * 8


def test_batch_invariance_check_passes_here() -> None:
    names = [probe.name for probe in probes(ModelConfig())]
    assert {"router", "expert of width 40", "attention scores over 160"} <= set(names)
    check_batch_invariance(ModelConfig())


def test_batch_invariance_check_names_variant_product() -> None:
    mixing = RowProbe("mixing product", 4, lambda x: x * (1 + (len(x) == 40)))
    with pytest.raises(NotBatchInvariant, match="mixing product gives other bits at 40 rows"):
        check_probes([mixing])


def test_batch_invariance_check_rejects_several_threads() -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(NotBatchInvariant, match="2 threads"):
            check_batch_invariance(CONFIG)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Batch((Sequence(SLOTS, text(0, 3), 0),)), "slot 24 is outside the cache of 24"),
        (Batch((Sequence(0, text(0, 3), 158),)), "outside the context of 160"),
        (Batch((), (Sequence(0, text(0, 1), -1),)), "outside the context of 160"),
    ],
)
def test_forward_rejects_sequence_outside_kv_cache(batch: Batch, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        forward(batch, KVCache(CONFIG, SLOTS))


def test_batch_rejects_malformed_sequences() -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        Batch((Sequence(1, text(0, 3), 0),), (Sequence(1, text(0, 1), 3),))
    with pytest.raises(ValueError, match="has not one token"):
        Batch((), (Sequence(1, text(0, 2), 3),))
    with pytest.raises(ValueError, match="has no token"):
        Batch((Sequence(1, text(0, 3)[:0], 0),))
    with pytest.raises(ValueError, match="at least one slot"):
        KVCache(CONFIG, 0)


def test_batch_variant_device_gets_grouped_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GPU does, whose sums of few rows are other trees than those of many."""
    probe_names: list[list[str]] = []

    def fail_at_first(candidates: list[RowProbe], device: torch.device) -> None:
        probe_names.append([probe.name for probe in candidates])
        if len(probe_names) == 1:
            raise NotBatchInvariant("other bits")

    monkeypatch.setattr(rows, "_grouped", set())
    monkeypatch.setattr(invariance, "check_probes", fail_at_first)
    check_batch_invariance(CONFIG, torch.device("meta"))
    assert rows._grouped == {torch.device("meta")}
    everything, again = probe_names
    assert set(everything) - set(again) == {name for name in everything if "attention " in name} - {
        name for name in everything if "attention product" in name
    }


def test_batch_variant_host_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(candidates: list[RowProbe], device: torch.device) -> None:
        raise NotBatchInvariant("other bits")

    monkeypatch.setattr(invariance, "check_probes", fail)
    with pytest.raises(NotBatchInvariant):
        check_batch_invariance(CONFIG)
    assert rows._grouped == set()


def test_grouped_rows_keep_bits_and_use_one_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = random_weights(CONFIG, seed=5)
    batch = Batch(tuple(Sequence(slot, torch.arange(1, 20), 0) for slot in range(3)))

    def forward() -> Tensor:
        return Decoder(weights).forward(batch, KVCache(CONFIG, SLOTS), LocalExperts(weights))

    plain, shapes, product = forward(), set(), torch.mm

    def recording_mm(x: Tensor, weight: Tensor) -> Tensor:
        shapes.add(len(x))
        return product(x, weight)

    monkeypatch.setattr(rows, "_grouped", {torch.device("cpu")})
    monkeypatch.setattr(torch, "mm", recording_mm)
    assert torch.equal(forward(), plain)
    assert shapes == {rows.GROUP_ROWS}
