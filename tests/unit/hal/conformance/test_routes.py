"""Tables made from a few numbers are tables that can be routed by."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.conformance import routes
from equipoise.hal.routing import SHARE_ONE, route_hashed

EXPERTS = 3
rest = st.lists(st.integers(0, EXPERTS - 1), max_size=5)
weights = st.lists(st.integers(0, 4), min_size=8, max_size=8)


@given(rest, weights)
def test_table_shares_sum_to_one_per_expert(rest: list[int], weights: list[int]) -> None:
    made = routes.table([*range(EXPERTS), *rest], weights)
    assert (made.cumulative[made.start[1:].long() - 1] == SHARE_ONE).all()


@given(rest, weights)
def test_table_routes_no_token_to_zero_weight_slot(rest: list[int], weights: list[int]) -> None:
    held = [*range(EXPERTS), *rest]
    ids = torch.arange(60, dtype=torch.int32) % EXPERTS
    slots, _ = route_hashed(ids, routes.table(held, weights), 0, 0, 0)
    for slot in slots.tolist():
        rivals = [weights[other] for other, expert in enumerate(held) if expert == held[slot]]
        assert weights[slot] or not any(rivals)


def test_table_shares_follow_weights() -> None:
    assert routes.table([0, 0], [1, 3]).cumulative.tolist() == [SHARE_ONE // 4, SHARE_ONE]
