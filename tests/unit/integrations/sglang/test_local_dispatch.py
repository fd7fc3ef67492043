"""Dispatch `local` on the CPU, with stand-ins for SGLang's metadata."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.balancer.experts.placement import ABSENT, ExpertShape
from equipoise.balancer.experts.planning.planner import plan
from equipoise.hal.errors import IntegrationError
from equipoise.hal.levelled_routing import route_levelled
from equipoise.hal.routing import SHARE_ONE, build_table
from equipoise.integrations.sglang import local_dispatch
from equipoise.integrations.sglang.dispatch_tables import (
    even_candidates,
    rank_dispatch,
    weighted_candidates,
)
from equipoise.integrations.sglang.local_dispatch import BATCH, DISPATCH, Batch, LocalDispatch

LOCATION = "sglang.srt.eplb.expert_location"
RANKS = 2


def metadata_of(placement: Any, experts: int, ranks: int = RANKS) -> Any:
    """What is read of SGLang's metadata; placement (layers, slots)."""
    held = torch.as_tensor(placement)
    return SimpleNamespace(
        physical_to_logical_map=held,
        physical_to_logical_map_cpu=held,
        num_layers=held.shape[0],
        num_physical_experts=held.shape[1],
        num_logical_experts=experts,
        ep_size=ranks,
    )


def reference(ids: torch.Tensor, held: list[int], experts: int, rank: int, layer: int) -> Any:
    """Slots of `ids`, any shape, by the definition; ids of no expert stay."""
    shares = [SHARE_ONE if expert not in held[:slot] else 0 for slot, expert in enumerate(held)]
    table = build_table(torch.tensor(held).int(), torch.tensor(shares).int(), experts)
    slots, _ = route_levelled(ids.int().flatten(), table, RANKS, rank, layer)
    routed = torch.where(slots == len(held), ids.int().flatten(), slots)
    return routed.view(ids.shape).to(ids.dtype)


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(0, 30),
    unpadded=st.none() | st.integers(0, 30),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    rank=st.integers(0, RANKS - 1),
)
def test_local_dispatch_routes_by_definition_and_leaves_padding(
    seed: int, rows: int, unpadded: int | None, dtype: torch.dtype, rank: int
) -> None:
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(1, 7))
    extra = rng.integers(0, experts, (3, experts % RANKS + 4))
    first, second = (
        rng.permuted(np.hstack([np.tile(np.arange(experts), (3, 1)), extra]), axis=1).tolist()
        for _ in range(2)
    )
    ids = torch.from_numpy(rng.integers(-1, experts + 1, (rows, 6))).to(dtype)[:, ::2]
    counted, bound = ids.clone(), None
    if unpadded is not None:
        counted[unpadded:], bound = -1, torch.tensor([unpadded], dtype=torch.int32)
    with closing(LocalDispatch(metadata_of(first, experts), rank)) as dispatch:
        for held in (first, [first[0], second[1], first[2]]):
            for layer in range(3):
                slots = dispatch.slots(ids, bound, layer)
                expected = reference(counted, held[layer], experts, rank, layer)
                if unpadded is not None:
                    expected[unpadded:] = ids[unpadded:]
                assert torch.equal(slots, expected)
                assert (slots.dtype, slots.is_contiguous()) == (dtype, True)
            dispatch.install(metadata_of(second, experts), [1])


def test_local_dispatch_levels_what_even_shares_do_not() -> None:
    """One expert on both ranks, another on the first only, each with half of the rows."""
    with closing(LocalDispatch(metadata_of([[0, 1, 0, 2]], 3), 0)) as dispatch:
        slots = dispatch.slots(torch.tensor([[0, 1]] * 8), None, 0)
    assert torch.bincount(slots.flatten(), minlength=4).tolist() == [0, 8, 8, 0]


def drawn_slots(slots: Any, ids: Any, rng: np.random.Generator) -> Any:
    """What `dynamic` draws for each id of the candidates in a table (experts, candidates)."""
    return slots[ids, rng.integers(0, 65536, ids.size) % (slots != ABSENT).sum(axis=1)[ids]]


def test_local_dispatch_levels_ranks_at_the_size_of_deepseek() -> None:
    """The sum over ranks, as routed; 128 tokens of 8 experts on each."""
    layers, experts, rows = 2, 256, 128 * 8
    shape = ExpertShape(layers, experts, slots=288, ranks=32)
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.normal(0, 1.05, (layers, experts)))
    popularity /= popularity.sum(axis=1, keepdims=True)
    load = (1e7 * popularity).astype(np.int64)
    planned = plan(load, slots=shape.slots, ranks=shape.ranks, split="even").placement
    placement = planned.astype(np.int64)
    even = even_candidates(placement, shape)
    by_load = weighted_candidates(load, placement, shape)
    static = rank_dispatch(load, placement, shape, nodes=4)
    totals: dict[str, Any] = defaultdict(lambda: np.zeros((layers, shape.slots), np.int64))
    for rank in range(shape.ranks):
        metadata = metadata_of(placement, experts, shape.ranks)
        with closing(LocalDispatch(metadata, rank)) as dispatch:
            for layer in range(layers):
                counts = rng.multinomial(rows, popularity[layer])
                ids = rng.permuted(np.repeat(np.arange(experts), counts))
                batch = torch.from_numpy(ids).view(-1, 8)
                for name, slots in {
                    "local": dispatch.slots(batch, None, layer).flatten().numpy(),
                    "dynamic, even": drawn_slots(even.slots[layer], ids, rng),
                    "dynamic, by load": drawn_slots(by_load.slots[layer], ids, rng),
                    "static, by load": static.slots[rank, layer][ids],
                }.items():
                    totals[name][layer] += np.bincount(slots, minlength=shape.slots)
    imbalances = {}
    for name, by_slot in totals.items():
        ranks = by_slot.reshape(layers, shape.ranks, -1).sum(axis=2)
        imbalances[name] = float((ranks.max(axis=1) / ranks.mean(axis=1) - 1).mean())
        print(f"{name}: {imbalances[name]:.3f}")
    assert imbalances.pop("local") < min(imbalances.values()) / 2


def test_local_dispatch_refuses_device_without_backend() -> None:
    metadata = metadata_of([[0, 1]], 2)
    metadata.physical_to_logical_map = torch.empty(1, 2, device="meta")
    with pytest.raises(IntegrationError, match="no backend for a device of type 'meta'"):
        LocalDispatch(metadata, 0)


def test_local_dispatch_refuses_kernels_that_level_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[CpuAccelerator] = []
    monkeypatch.setattr(CpuKernels, "levels_on_device", False)
    monkeypatch.setattr(CpuAccelerator, "close", lambda self: closed.append(self))
    with pytest.raises(IntegrationError, match="dispatch local is not for a device of type cpu"):
        LocalDispatch(metadata_of([[0, 1]], 2), 0)
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("placement", "experts", "message"),
    [
        ([[0, 1, 0, 1], [0, 0, 2, 2]], 3, "a slot for every expert"),
        ([[0, 1, 2, 0]], 3, "cannot follow a change from ExpertShape\\(layers=2, .*layers=1, "),
    ],
)
def test_local_dispatch_refuses_placements_that_it_cannot_install(
    placement: Any, experts: int, message: str
) -> None:
    with (
        closing(LocalDispatch(metadata_of([[0, 1, 2, 0]] * 2, 3), 0)) as dispatch,
        pytest.raises(IntegrationError, match=message),
    ):
        dispatch.install(metadata_of(placement, experts), range(len(placement)))


@pytest.fixture
def location(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's module of metadata, of which there is none yet."""
    module: Any = ModuleType(LOCATION)
    module.installed, module.backend = None, "none"
    module.get_global_expert_location_metadata = lambda: module.installed
    module.get_exec = lambda: SimpleNamespace(moe=SimpleNamespace(moe_a2a_backend=module.backend))
    for name in ("sglang", "sglang.srt", "sglang.srt.eplb"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, LOCATION, module)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2 * RANKS + 1)
    yield module
    dispatch = getattr(module.installed, DISPATCH, None)
    if dispatch is not None:
        dispatch.close()


def set_metadata(location: Any, value: Any) -> None:
    """As SGLang calls its own function with the hook around it."""

    def stock(value: Any, allow_overwrite: bool) -> None:
        assert allow_overwrite
        location.installed = value

    local_dispatch.follow_metadata(stock, value, allow_overwrite=True)


IDS = torch.arange(60).view(20, 3) % 3


@pytest.mark.parametrize(("backend", "rank"), [("none", 0), ("deepep", 1)])
def test_ranks_with_the_same_rows_route_alike(location: Any, backend: str, rank: int) -> None:
    held = [1, 0, 0, 2, 0, 2, 1, 1]
    location.backend = backend
    set_metadata(location, metadata_of([held], 3))
    info = SimpleNamespace(**{BATCH: Batch(0, None)})
    slots = local_dispatch.map_to_slots(pytest.fail, IDS, info)
    assert torch.equal(slots, reference(IDS, held, 3, rank, 0))
    other = reference(IDS, held, 3, 1 - rank, 0)
    assert not torch.equal(slots, other), "the case does not tell ranks apart"


def test_metadata_that_replaces_other_keeps_its_tables(location: Any) -> None:
    set_metadata(location, metadata_of([[0, 1, 2, 0]], 3))
    dispatch = getattr(location.installed, DISPATCH)
    set_metadata(location, metadata_of([[2, 1, 0, 0]], 3))
    assert getattr(location.installed, DISPATCH) is dispatch
    assert torch.equal(
        dispatch.slots(IDS, None, 0), reference(IDS, [2, 1, 0, 0], 3, rank=0, layer=0)
    )


def test_update_is_followed_by_installed_metadata_alone(location: Any) -> None:
    first, other = metadata_of([[0, 1, 2, 0]], 3), metadata_of([[2, 1, 0, 0]], 3)
    set_metadata(location, first)

    def stock(metadata: Any, other: Any, layers: list[int]) -> None:
        metadata.physical_to_logical_map_cpu = other.physical_to_logical_map_cpu

    local_dispatch.follow_update(stock, metadata_of([[0, 1, 2, 1]], 3), other, [0])
    dispatch = getattr(first, DISPATCH)
    before, after = (reference(IDS, held, 3, 0, 0) for held in ([0, 1, 2, 0], [2, 1, 0, 0]))
    assert torch.equal(dispatch.slots(IDS, None, 0), before)
    local_dispatch.follow_update(stock, first, other, [0])
    assert torch.equal(dispatch.slots(IDS, None, 0), after)


def test_model_without_experts_opens_no_device(location: Any) -> None:
    set_metadata(location, None)
    assert location.installed is None


def test_batch_that_sglang_maps_by_itself_stays_with_it() -> None:
    def resolve(layer_id: int, is_draft: bool) -> tuple[None, Any]:
        return None, None if is_draft else SimpleNamespace()

    assert local_dispatch.mark_batch(resolve, layer_id=1, is_draft=True) == (None, None)
    _, info = local_dispatch.mark_batch(resolve, layer_id=1, is_draft=False)
    assert getattr(info, BATCH) == Batch(1, None)
    for unmarked in (None, SimpleNamespace()):
        mapped = local_dispatch.map_to_slots(lambda *given: given, IDS, unmarked)  # type: ignore[arg-type]
        assert mapped == (IDS, unmarked, None)
