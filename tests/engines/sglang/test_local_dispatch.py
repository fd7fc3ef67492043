"""Dispatch `local` behind SGLang's own router, against the definition of a levelled pass."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from engines.sglang.test_eplb_manager import (
    DISPATCH_RANKS,
    LAYERS,
    MILD_SWITCHES,
    OURS,
    RANKS,
    WINDOWS,
    dispatched_imbalance,
    installed,
    serve,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.hal.levelled_routing import route_levelled
from equipoise.hal.routing import SHARE_ONE, RoutingTable, build_table

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]
LOCAL = '{"eplb_policy": {"dispatch": "local"}}'
EPLB = {"enable_eplb": True, "ep_size": 2, "tp_size": 2}
PADDING = -1


def table_of(held: list[int], experts: int) -> RoutingTable:
    """The routing table of a layer; a levelled pass does not read its shares."""
    shares = [SHARE_ONE if expert not in held[:slot] else 0 for slot, expert in enumerate(held)]
    return build_table(torch.tensor(held).int(), torch.tensor(shares).int(), experts)


def expected_slots(batch: dict[str, Any], held: list[int], experts: int, rank: int) -> Any:
    """(rows, top_k), by the definition; padding ids stay, and SGLang masks padding rows."""
    ids = torch.tensor(batch["ids"])
    rows = len(ids) if batch["unpadded"] is None else batch["unpadded"]
    counted = ids.clone()
    counted[rows:] = PADDING
    slots, _ = route_levelled(
        counted.int().flatten(), table_of(held, experts), RANKS, rank, batch["layer"]
    )
    slots = torch.where(slots == len(held), ids.flatten().int(), slots).view(ids.shape)
    slots[rows:] = PADDING
    return slots.tolist()


@st.composite
def drawn_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Two placements of any shape that two ranks can have, and batches with padding."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    redundant = draw(st.integers(0, 4)) * RANKS + experts % RANKS
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def placement() -> Any:
        extra = rng.integers(0, experts, (layers, redundant))
        every = np.tile(np.arange(experts), (layers, 1))
        return rng.permuted(np.concatenate([every, extra], axis=1), axis=1).tolist()

    def batch() -> dict[str, Any]:
        rows, top_k = draw(st.integers(1, 40)), draw(st.integers(1, 3))
        # Few experts have most rows, as in traffic; some ids are no expert's.
        ids = np.minimum(rng.geometric(draw(st.floats(0.1, 0.9)), (rows, top_k)) - 1, experts)
        ids[ids == experts] = draw(st.sampled_from([PADDING, experts]))
        return {
            "layer": draw(st.integers(0, layers - 1)),
            "ids": ids.tolist(),
            "unpadded": draw(st.none() | st.integers(0, rows)),
        }

    return {
        "experts": experts,
        "placements": [placement(), placement()],
        "updated": sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1))),
        "batches": [batch() for _ in range(draw(st.integers(1, 4)))],
        "backend": draw(st.sampled_from(["none", "deepep"])),
    }


def run(play: Play, case: dict[str, Any], frozen: bool = False, compiled: int = 0) -> list[Any]:
    """What each rank answers."""
    return play("router:route", RANKS, plugin=LOCAL, frozen=frozen, compiled=compiled, **case)


def expected_answers(case: dict[str, Any], rank: int, stage: str) -> list[Any]:
    """The slots of each batch before or after the update, on one rank."""
    first, second = case["placements"]
    changed = case["updated"] if stage == "after" else []
    held = [second[layer] if layer in changed else first[layer] for layer in range(len(first))]
    # Without an all-to-all backend, ranks have the same rows, and have to agree.
    hashed = 0 if case["backend"] == "none" else rank
    return [
        expected_slots(batch, held[batch["layer"]], case["experts"], hashed)
        for batch in case["batches"]
    ]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=drawn_cases())
def test_sglang_router_levels_each_batch_before_and_after_update(
    play: Play, case: dict[str, Any]
) -> None:
    for rank, answer in enumerate(run(play, case)):
        for stage in ("before", "after"):
            assert answer[stage] == expected_answers(case, rank, stage), stage


SMALL_CASE = {
    "experts": 4,
    "placements": [[[0, 1, 2, 3, 0, 1]] * 2, [[3, 2, 1, 0, 3, 3]] * 2],
    "updated": [1],
    "batches": [
        {"layer": layer, "ids": [[0, 3], [3, 1], [3, 0], [3, 2], [2, 3]], "unpadded": 4}
        for layer in (0, 1)
    ],
    "backend": "deepep",
}


def test_sglang_compiled_mapping_levels_as_the_eager_one(play: Play) -> None:
    for answer in run(play, SMALL_CASE, compiled=2):
        assert answer["compiled"] == answer["after"]


def test_sglang_tables_that_miss_an_update_are_noticed(play: Play) -> None:
    for rank, answer in enumerate(run(play, SMALL_CASE, frozen=True)):
        assert answer["before"] == expected_answers(SMALL_CASE, rank, "before")
        unchanged, changed = expected_answers(SMALL_CASE, rank, "after")
        assert answer["after"][0] == unchanged
        assert answer["after"][1] != changed


def test_sglang_local_dispatch_levels_ranks_in_its_own_eplb(play: Play) -> None:
    """Of the next window: a table has the load of the last one, a batch its own."""
    tables, local = (
        dispatched_imbalance(serve(play, plugin, ranks=DISPATCH_RANKS, loads=MILD_SWITCHES))
        for plugin in (OURS, LOCAL)
    )
    assert local < 0.25 * tables, (local, tables)


def test_sglang_local_dispatch_updates_layers_that_move_alone(play: Play) -> None:
    answers = serve(play, LOCAL, chunk=1)
    changed = [
        np.flatnonzero((before != after).any(axis=1)).tolist()
        for before, after in pairwise(installed(answers))
    ]
    assert answers[0]["updates"] == [[layer] for layers in changed for layer in layers]
    assert sum(len(layers) < LAYERS for layers in changed) > WINDOWS, "too few layers are left out"


@pytest.mark.parametrize(
    ("arguments", "dispatch"),
    [
        ({"moe_a2a_backend": "deepep"}, "dynamic"),
        ({"moe_a2a_backend": "deepep", "ep_dispatch_algorithm": "dynamic"}, "dynamic"),
        ({}, "dynamic"),
    ],
)
def test_sglang_start_with_local_dispatch_takes_replaced_algorithm(
    play: Play, arguments: dict[str, Any], dispatch: str
) -> None:
    answers = play("eplb_manager:start", 1, settings=LOCAL, **EPLB, **arguments)
    assert answers == [{"error": None, "dispatch": dispatch}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"moe_a2a_backend": "deepep", "ep_dispatch_algorithm": "static"},
            "equipoise cannot be switched on: dispatch local takes the place of "
            "--ep-dispatch-algorithm dynamic, not of static",
        ),
        (
            {"moe_a2a_backend": "mooncake", "elastic_ep_backend": "mooncake"},
            "equipoise cannot be switched on: dispatch local is not for --elastic-ep-backend, "
            "where ranks come and go",
        ),
    ],
)
def test_sglang_start_refuses_what_local_dispatch_cannot_serve(
    play: Play, arguments: dict[str, Any], message: str
) -> None:
    answers = play("eplb_manager:start", 1, settings=LOCAL, **EPLB, **arguments)
    assert answers[0]["error"] == message
