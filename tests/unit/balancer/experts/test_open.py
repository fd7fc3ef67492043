"""From registered models to running balancers: a target of two families, and its draft."""

from itertools import chain
from time import sleep

import pytest
from helpers.harnesses.two_family_model import (
    BUDGET,
    DRAFT,
    EXPERTS,
    PER_RANK,
    RANKS,
    SCALED,
    TARGET,
    WIDE,
    Given,
    Kind,
    in_place_from_host,
    open_all,
    settings,
    staged_from_peers,
)
from helpers.harnesses.two_rank_serving import Habit, commits, serve, violations
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.strategies.expert_tensors import KINDS
from hypothesis import given
from hypothesis import settings as settled
from hypothesis import strategies as st

from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.engine.states import Updating
from equipoise.balancer.experts.model_balancer import ModelBalancer
from equipoise.balancer.experts.open import (
    ModelStart,
    UpdatePathFactory,
    layer_group_specs,
    open_balancers,
)
from equipoise.balancer.experts.placement import Layout, even_shares, initial_placement
from equipoise.balancer.experts.transfer import layer_locks
from equipoise.balancer.experts.transfer.layer_locks import EntryCounter, StepKind
from equipoise.balancer.experts.weights.memory_report import MemoryReport
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.hal.errors import (
    CommunicatorFailed,
    EngineError,
    PlacementError,
    RanksDiffer,
    UsageError,
)
from equipoise.hal.stream import Role

update_paths = pytest.mark.parametrize("update_path", [staged_from_peers, in_place_from_host])


@pytest.mark.slow
@update_paths
@pytest.mark.parametrize("draft_role", [Role.COMPUTE, Role.AUX])
def test_model_balancers_move_experts_of_every_layer_group(
    update_path: UpdatePathFactory, draft_role: Role
) -> None:
    rank_records = serve(update_path, habit=Habit(role=draft_role))
    assert violations(rank_records) == []
    for name, families in (("target", 2), ("draft", 1)):
        first_commits, second_commits = (commits(rank_record, name) for rank_record in rank_records)
        assert first_commits == second_commits
        assert len(first_commits) == families
        assert all(len(commit_steps) >= 2 for commit_steps in first_commits), (
            "every family has committed rebalances"
        )
    assert rank_records[0].placements == rank_records[1].placements
    assert [rank_record.aborts for rank_record in rank_records] == [0, 0]
    assert all(rank_record.staged <= BUDGET for rank_record in rank_records)


def test_model_balancers_log_device_memory_at_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(member: GroupMember) -> MemoryReport:
        balancers = open_all(member, [TARGET, DRAFT], staged_from_peers, settings())
        balancers.close()
        return balancers.memory_report

    with caplog.at_level("INFO", "equipoise.memory"):
        report, _ = on_ranks(RANKS, program)
    assert [entry.name.split(": ")[0] for entry in report.items] == ["target"] * 7 + ["draft"] * 5
    staging_bytes = sum(e.nbytes or 0 for e in report.items if "staging" in e.name)
    assert 0 < staging_bytes <= BUDGET
    assert [record.message for record in caplog.records] == [f"device memory of a rank:\n{report}"]


@update_paths
def test_model_balancers_close_all_communicators(update_path: UpdatePathFactory) -> None:
    def program(member: GroupMember) -> None:
        balancers = open_all(member, [TARGET, DRAFT], update_path, settings())
        groups = [group for model in balancers for group in model.groups]
        for _ in range(2):
            balancers.close()
        communicators = [one for group in groups for one in group.communicators]
        assert len(communicators) >= len(groups)
        for communicator in communicators:
            with pytest.raises(CommunicatorFailed, match="was closed"):
                communicator.barrier()

    on_ranks(RANKS, program)


@update_paths
def test_draft_model_moves_by_its_own_step_counter(update_path: UpdatePathFactory) -> None:
    drafts = (3, 0, 0, 1, 2, 0)
    rank_records = serve(update_path, habit=Habit(drafts=lambda step: drafts[step % len(drafts)]))
    assert violations(rank_records) == []
    assert commits(rank_records[0], "draft") == commits(rank_records[1], "draft")
    assert commits(rank_records[0], "draft")[0]
    assert all(commits(rank_records[0], "target"))


@pytest.mark.slow
@update_paths
@settled(max_examples=6, deadline=None)
@given(kinds=st.lists(KINDS.map(tuple), min_size=1, max_size=3))
def test_model_balancers_move_experts_of_any_tensor_kinds(
    update_path: UpdatePathFactory, kinds: list[Kind]
) -> None:
    model = Given("m", dict(enumerate(kinds)), entries={0: 2})
    rank_records = serve(update_path, models=[model])
    assert violations(rank_records) == []
    assert all(commits(rank_records[0], "m"))
    assert commits(rank_records[0], "m") == commits(rank_records[1], "m")


def test_layer_groups_of_a_model_open_rebalances_at_different_boundaries() -> None:
    (rank_record, _) = serve()
    opening_steps = [
        {report.opened_at for report in reports} for reports in rank_record.reports["target"]
    ]
    assert all(opening_steps)
    assert not opening_steps[0] & opening_steps[1]


def let_writer_run(balancer: ModelBalancer, step: int) -> None:
    """Let a writer that may write do so before the next entry."""
    for group in balancer.groups:
        state = group.engine.state
        if group.step_kind(step) is not StepKind.UPDATE or not isinstance(state, Updating):
            continue
        group.engine.after_launch()
        for _ in range(30):
            if all(task.done() for task in state.writes):
                break
            sleep(0.01)


class BackAtFirst(EntryCounter):
    """Mutant: the lock goes back at the first exit of a step."""

    def exit(self, give_back: object) -> None:
        with self._mutex:
            self._exited += 1
            if self._exited % self._entries == 1:
                give_back()  # type: ignore[operator]


@pytest.mark.slow
def test_layer_entered_three_times_is_not_rewritten_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_records = serve(in_place_from_host, models=[DRAFT], habit=Habit(between=let_writer_run))
    assert violations(rank_records) == []
    assert commits(rank_records[0], "draft")[0]
    monkeypatch.setattr(layer_locks, "EntryCounter", BackAtFirst)
    assert violations(
        serve(in_place_from_host, models=[DRAFT], habit=Habit(between=let_writer_run))
    ), "the mutant lives"


def test_model_balancers_refuse_ranks_with_different_registrations() -> None:
    other = Given("draft", {0: WIDE, 1: WIDE})

    def program(member: GroupMember) -> None:
        models = (TARGET, other if member.rank else DRAFT)
        with pytest.raises(
            RanksDiffer, match="'draft', layer group 0: ranks differ in registration"
        ):
            open_all(member, models, staged_from_peers, settings())
        member.fabric.open("test[target:0].loads").barrier().result(20.0)  # opened only now

    on_ranks(RANKS, program)


def test_model_balancers_refuse_ranks_with_different_settings() -> None:
    def families(member: GroupMember) -> None:
        with pytest.raises(RanksDiffer, match="rank 0 has nothing; rank 1 has"):
            open_all(member, (TARGET, DRAFT)[: 1 + member.rank], staged_from_peers, settings())

    def cadence(member: GroupMember) -> None:
        with pytest.raises(RanksDiffer, match="max_stalled_steps: rank 0 has 5; rank 1 has 55"):
            open_all(
                member,
                (DRAFT,),
                staged_from_peers,
                settings(max_stalled_steps=5 + member.rank * 50),
            )

    def layout(member: GroupMember) -> None:
        row = (0, 1, 2, 3, 0, 1 + member.rank)
        with pytest.raises(
            RanksDiffer, match=r"model 'draft', layer group 0: ranks differ in layout"
        ):
            open_all(member, (DRAFT,), staged_from_peers, settings(), row)

    for program in (families, cadence, layout):
        on_ranks(RANKS, program)


def test_model_balancers_name_model_in_opening_errors() -> None:
    def program(member: GroupMember) -> None:
        model = DRAFT.model(member.rank)
        placement = initial_placement(model.shape(RANKS))
        start = ModelStart(Layout(placement, even_shares(placement, EXPERTS)), settings())
        resources = (member.accelerator, member.fabric, ModelSet((model,)))
        with pytest.raises(UsageError, match=r"starts of \['x'\] for \['draft'\]"):
            open_balancers(*resources, {"x": start})
        short_start = ModelStart(Layout(placement[:, :4], start.layout.shares), settings())
        with pytest.raises(PlacementError, match="model 'draft': a placement is int32"):
            open_balancers(*resources, {"draft": short_start})
        with pytest.raises(EngineError, match="3 bytes of staging are not enough: one slot of"):
            open_balancers(*resources, {"draft": start}, staging_bytes=3)
        message = "model 'draft', layers 0 counted from 0: .* needs a budget of staging"
        with pytest.raises(EngineError, match=message):
            open_balancers(*resources, {"draft": start})

    on_ranks(RANKS, program)


@given(
    names=st.lists(st.sampled_from(["a", "a.1", "a:0", "b", "[b"]), min_size=1, unique=True),
    layers=st.lists(st.sampled_from([WIDE, SCALED]), min_size=1, max_size=4),
    sub_window=st.integers(1, 4),
    windows=st.integers(1, 12),
    phase=st.integers(0, 3),
)
def test_parts_have_distinct_labels_and_spread_phases(
    names: list[str], layers: list[Kind], sub_window: int, windows: int, phase: int
) -> None:
    interval = sub_window * windows
    models = ModelSet(tuple(Given(n, dict(enumerate(layers))).model(0) for n in names))
    placement = initial_placement(models.models[0].shape(RANKS))
    config = settings(
        window_size=sub_window,
        sub_window=sub_window,
        step_interval=interval,
        step_offset=phase % windows * sub_window,
    )
    starts = dict.fromkeys(
        names, ModelStart(Layout(placement, even_shares(placement, EXPERTS)), config)
    )
    parts = layer_group_specs(models, starts, 0)
    labels = [part.start.config.name for part in parts]
    groups = [EPGroup((0,), 0, number) for number in range(len(layers) + 1)]
    every = [members.scoped_name(label) for label in labels for members in groups]
    assert len(set(every)) == len(every), "nor may one be another's without a lost rank"
    phases = [part.start.config.step_offset for part in parts]
    most = max(phases.count(one) for one in phases)
    assert most == -(-len(parts) // windows), "no boundary has more rebalances than it must"
    rows = [part.start.layout.placement.shape for part in parts]
    assert sum(shape[0] for shape in rows) == len(names) * len(layers)
    assert {shape[1] for shape in rows} == {RANKS * PER_RANK}
    assert all(part.staging == 0 for part in parts)


def test_parts_keep_staging_of_all_models_within_budget() -> None:
    models = ModelSet((TARGET.model(0), DRAFT.model(0)))
    placements = {model.name: initial_placement(model.shape(RANKS)) for model in models}
    starts = {
        name: ModelStart(Layout(p, even_shares(p, EXPERTS)), settings())
        for name, p in placements.items()
    }
    for budget in (60, 100, 150):
        parts = layer_group_specs(models, starts, budget)
        staging_sizes = [
            part.staging * part.model.groups[part.group_number].slot_bytes for part in parts
        ]
        assert sum(staging_sizes) <= budget
        assert min(part.staging for part in parts) >= 1
    assert list(chain.from_iterable(p.model.groups[p.group_number].layers for p in parts)) == [
        0,
        2,
        1,
        0,
    ]
