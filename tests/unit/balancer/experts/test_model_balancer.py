"""Models that serve beside each other: their layers, their errors, and what is left of them."""

import threading
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.harnesses.two_family_model import (
    DRAFT,
    EXPERTS,
    RANKS,
    TARGET,
    WIDE,
    Given,
    in_place_from_host,
    open_all,
    settings,
    staged_from_peers,
)
from helpers.harnesses.two_rank_serving import PLAIN, Run, Story, commits, violations
from helpers.processes.thread_ranks import GroupMember, on_ranks
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.config import ShareMode
from equipoise.balancer.experts.engine.states import RebalanceReport
from equipoise.balancer.experts.model_balancer import BalancerSet, ModelBalancer, add_context
from equipoise.balancer.experts.open import UpdatePathFactory
from equipoise.hal.errors import (
    EngineError,
    ExpertsLost,
    PlacementError,
    RanksDiffer,
    RegistrationError,
    UsageError,
)
from equipoise.hal.stream import Role

BOTH = (TARGET, DRAFT)
RANKS_BEFORE_LOSS = 3
STEPS_AT_LOSS = {"target": 2, "draft": 4}
"""The boundaries after which a rank is lost."""


def test_router_is_found_by_layer_number_of_model() -> None:
    def program(member: GroupMember) -> None:
        balancers = open_all(member, BOTH, staged_from_peers, settings())
        target = balancers["target"]
        scaled_router, wide_router = target.router(4), target.router(8)
        assert wide_router == target.router(3)
        assert scaled_router.installed is not wide_router.installed
        assert (scaled_router.row, wide_router.row, target.router(6).row) == (0, 0, 1)
        ids = torch.tensor([[0], [3]], dtype=torch.int32)
        member.accelerator.synchronize(20.0)
        slots = target.router(6).route(0, ids)
        member.accelerator.synchronize(20.0)
        placement = target.layout.placement[target.model.layer(6)]
        assert placement[slots.flatten().numpy()].tolist() == [0, 3]
        assert target.counters[0].tolist() == [[0] * EXPERTS, [1, 0, 0, 1]]
        balancers.close()

    on_ranks(RANKS, program)


def test_layer_router_tells_what_all_ranks_send_of_its_own_layer() -> None:
    def program(member: GroupMember) -> None:
        exact = settings(shares=ShareMode.EXACT)
        balancers = open_all(member, BOTH, staged_from_peers, exact)
        target, compute = balancers["target"], member.accelerator.stream(Role.COMPUTE)
        rows: list[list[int]] = []

        def route() -> None:
            target.router(6).route(0, torch.tensor([[0], [3]], dtype=torch.int32))
            counts = target.router(6).dispatch_counts()
            assert counts is not None
            assert counts.generations == (target.router(6).generation,) * RANKS
            rows.append(counts.rows.sum(1).tolist())
            with pytest.raises(EngineError, match="routed last: layer 1"):
                target.router(3).dispatch_counts()

        compute.launch(route)
        compute.synchronize(20.0)
        assert rows == [[2] * RANKS]
        balancers.close()

    on_ranks(RANKS, program)


def test_model_balancers_errors_name_model_and_layers() -> None:
    def program(member: GroupMember) -> None:
        balancers = open_all(member, BOTH, staged_from_peers, settings())
        with pytest.raises(UsageError, match="no model is named 'x'; there are: target, draft"):
            balancers["x"]
        with pytest.raises(RegistrationError, match="model 'draft' has no layer 3"):
            balancers["draft"].reading_slots(3, 0)
        with pytest.raises(RegistrationError, match="model 'target' has no layer 0"):
            balancers["target"].router(0)
        balancers["target"].before_step(0)
        message = r"model 'target', layers 4 counted from 0: boundary 2 was left out: now comes 4"
        with pytest.raises(EngineError, match=message):
            balancers["target"].before_step(4)
        error = EngineError("once")
        assert str(add_context(add_context(error, "draft"), "draft")) == "draft: once"
        balancers["draft"].before_step(0)
        balancers.close()

    on_ranks(RANKS, program)


@given(st.lists(st.lists(st.integers(0, 40)), min_size=1, max_size=3))
def test_model_balancer_reports_rebalances_of_all_groups_in_order(
    end_steps: list[list[int]],
) -> None:
    groups: Any = tuple(
        SimpleNamespace(
            engine=SimpleNamespace(
                reports=[
                    RebalanceReport(number, 0, step, "committed", 0, 0) for step in sorted(steps)
                ]
            )
        )
        for number, steps in enumerate(end_steps)
    )
    reports = ModelBalancer(TARGET.model(0), groups).reports
    assert [report.step for report in reports] == sorted(chain(*end_steps))
    for number, steps in enumerate(end_steps):
        assert [one.step for one in reports if one.number == number] == sorted(steps)


def test_extra_layer_entry_error_names_model() -> None:
    """The fourth entry would read what the writer writes."""

    def program(member: GroupMember) -> None:
        balancers = open_all(member, (DRAFT,), in_place_from_host, settings())
        run = Run(member, balancers, (FOUR_ENTRY_DRAFT,), PLAIN, range(RANKS))
        message = r"model 'draft', layers 0 counted from 0: layer 0 is entered more than 3 times"
        with pytest.raises(EngineError, match=message):
            run.steps(0, 20)

    on_ranks(RANKS, program)


FOUR_ENTRY_DRAFT = Given("draft", {0: WIDE}, entries={0: 4})


def reconfigure_without_rank(
    member: GroupMember,
    update_path: UpdatePathFactory,
    active: Sequence[int],
    row: Sequence[int] = (),
) -> BalancerSet | None:
    """Runs two steps of the target, then reconfigures for the active ranks."""
    balancers = open_all(member, BOTH, update_path, settings(), row)
    for step in range(2):
        balancers["target"].before_step(step)
        for number in (2 * step, 2 * step + 1):
            balancers["draft"].before_step(number)
    if member.rank not in active:
        balancers.close()
        return None
    return balancers.reconfigure(active, STEPS_AT_LOSS)


def test_reconfigure_continues_all_models_on_remaining_ranks() -> None:
    active = [0, 2]

    def program(member: GroupMember) -> Story | None:
        balancers = reconfigure_without_rank(member, in_place_from_host, active)
        if balancers is None:
            return None
        run = Run(member, balancers, BOTH, PLAIN, active, STEPS_AT_LOSS)
        run.steps(2, 26)
        return run.end()

    rank_records = [
        rank_record
        for rank_record in on_ranks(RANKS_BEFORE_LOSS, program)
        if rank_record is not None
    ]
    assert len(rank_records) == len(active)
    assert violations(rank_records) == []
    assert rank_records[0].placements == rank_records[1].placements
    assert all(
        commit_steps
        for name in ("target", "draft")
        for commit_steps in commits(rank_records[0], name)
    )


def test_experts_lost_error_uses_layer_numbers_of_model() -> None:
    frail_row = [0, 1, 2, 0, 1, 2, 3, 3, 0]

    def program(member: GroupMember) -> None:
        if member.rank == RANKS_BEFORE_LOSS - 1:
            reconfigure_without_rank(member, staged_from_peers, [0, 1], frail_row)
            return
        with pytest.raises(ExpertsLost) as error:
            reconfigure_without_rank(member, staged_from_peers, [0, 1], frail_row)
        assert error.value.lost_experts == {3: (3,), 4: (3,), 6: (3,)}
        assert str(error.value).startswith(
            "model 'target': no copy is left of expert(s) in layer 3"
        )

    on_ranks(RANKS_BEFORE_LOSS, program)
    assert not engine_threads(), "whoever cannot go on is closed whole"


def engine_threads() -> list[str]:
    """Names of the threads of all engines."""
    return [thread.name for thread in threading.enumerate() if "test[" in thread.name]


def test_attach_adds_stream_to_every_layer_group_of_its_model_only() -> None:
    def program(member: GroupMember) -> None:
        balancers = open_all(member, BOTH, staged_from_peers, settings())
        stream = member.accelerator.stream(Role.AUX)
        reader = balancers["target"].attach(stream)
        waiting_readers = [
            [group.serving_state.readers.wait_for_readers(compute) for group in balancer.groups]
            for balancer in balancers
            for compute in [member.accelerator.stream(Role.COMPUTE)]
        ]
        assert waiting_readers == [[(stream,), (stream,)], [()]]
        reader.detach()
        for group in balancers["target"].groups:
            readers = group.serving_state.readers
            assert readers.wait_for_readers(member.accelerator.stream(Role.COMPUTE)) == ()
        balancers.close()

    on_ranks(RANKS, program)


def test_reconfigure_with_too_few_slots_names_model() -> None:
    def program(member: GroupMember) -> None:
        if member.rank:
            reconfigure_without_rank(member, staged_from_peers, [0])
            return
        with pytest.raises(PlacementError, match="model 'target', layers 3, 6 counted from 0"):
            reconfigure_without_rank(member, staged_from_peers, [0])

    on_ranks(RANKS, program)


def test_reconfigure_refuses_ranks_with_different_steps() -> None:
    def program(member: GroupMember) -> None:
        balancers = open_all(member, BOTH, staged_from_peers, settings())
        with pytest.raises(UsageError, match=r"steps of \['draft'\], not of \['draft', 'target'\]"):
            balancers.reconfigure([0, 1], {"draft": 0})
        with pytest.raises(RanksDiffer, match=r"model 'draft', .* differ in step"):
            balancers.reconfigure([0, 1], {"target": 0, "draft": member.rank})

    on_ranks(RANKS, program)
