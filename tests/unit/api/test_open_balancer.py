"""`open_balancer`: its defaults, what may be given instead, and who is told what happens."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.processes.thread_ranks import GroupMember, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise
from equipoise import events
from equipoise.balancer.experts.config import default_sub_window
from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.balancer.formats.statistics import LayerNumbering
from equipoise.connection import Connection
from equipoise.hal.errors import (
    ConfigError,
    EngineError,
    PlacementError,
    RanksDiffer,
    RegistrationError,
)

LAYERS, EXPERTS, PER_RANK, WIDTH, RANKS, STEPS = 3, 4, 3, 8, 2, 24
SHAPE = equipoise.ExpertShape(LAYERS, EXPERTS, PER_RANK * RANKS, RANKS)
QUICK = equipoise.BalancerConfig(window_size=4, step_interval=8, min_gain=0)


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with equipoise.connect() as ranks:
        yield ranks


def build_model(
    placement: Any, experts: int = EXPERTS, name: str = "model"
) -> tuple[ExpertModel, list[torch.Tensor]]:
    """A model whose experts hold their own number; layer 1 has slots of twice the size."""
    weights = [
        row[:, None].repeat(1, WIDTH << (number == 1)).float()
        for number, row in enumerate(torch.tensor(np.asarray(placement)))
    ]
    registry = equipoise.ModelRegistry(name, weights[0].shape[0], experts)
    for number, tensor in enumerate(weights):
        registry.register(number, w=tensor)
    return registry.finalize((f"{n}.w", tensor) for n, tensor in enumerate(weights)), weights


def here(member: GroupMember) -> slice:
    return slice(member.rank * PER_RANK, (member.rank + 1) * PER_RANK)


def serve(ranks: Connection, balancer: equipoise.ModelBalancer, steps: range) -> None:
    """Traffic that wants expert 0 only."""
    ids = torch.zeros(16, 1, dtype=torch.int32)

    def forward(step: int) -> None:
        for layer in range(LAYERS):
            with balancer.reading_slots(layer, step):
                balancer.router(layer).route(step, ids)

    for step in steps:
        with balancer.step(step):
            ranks.compute.launch(lambda step=step: forward(step))  # type: ignore[misc]
        ranks.compute.synchronize(ranks.deadline)


def in_run(program: Callable[[Connection, GroupMember], Any]) -> list[Any]:
    return on_ranks(
        RANKS, lambda member: program(Connection(member.accelerator, member.fabric, 20.0), member)
    )


def test_balancer_with_defaults_moves_hot_expert_to_both_ranks() -> None:
    def program(ranks: Connection, member: GroupMember) -> Any:
        placement = equipoise.initial_placement(SHAPE)  # 0 1 2, 2 3 0
        placement[:, 5] = 3
        model, weights = build_model(placement[:, here(member)])
        with equipoise.open_balancer(ranks, model, QUICK, placement=placement) as balancer:
            assert balancer.load is None
            assert np.isnan(balancer.imbalance())
            serve(ranks, balancer, range(STEPS))
            ranks.barrier()
            installed = balancer.layout.placement
            assert balancer.load is not None
            observations = balancer.reports, balancer.imbalance(), balancer.load.tolist()
        for tensor, row in zip(weights, installed[:, here(member)], strict=True):
            assert tensor[:, 0].tolist() == row.tolist()
        return installed.tolist(), *observations, dict(balancer.aborts)

    mine, theirs = in_run(program)
    assert mine == theirs
    placement, reports, imbalance, load, aborts = mine
    assert all({0} <= {*row[:PER_RANK]} & {*row[PER_RANK:]} for row in placement)
    assert "committed" in {report.outcome for report in reports}
    assert [report.step for report in reports] == sorted(report.step for report in reports)
    assert imbalance < 0.5, "expert 0 on one rank alone makes it 1"
    assert {row[0] for row in load} == {16 * RANKS}, "a sub-window of one step"
    assert aborts == {}


def test_default_staging_is_one_layer_of_largest_group(single_rank: Connection) -> None:
    shape = equipoise.ExpertShape(LAYERS, EXPERTS, EXPERTS + 2, 1)
    model, _ = build_model(equipoise.initial_placement(shape))
    assert [len(group.layers) for group in model.groups] == [2, 1]
    with equipoise.open_balancer(single_rank, model) as balancer:
        entries = [entry for entry in balancer.memory_report.items if "staging" in entry.name]
    largest = model.groups[1].nbytes
    assert 0 < sum(entry.nbytes or 0 for entry in entries) <= largest
    assert all(entry.nbytes for entry in entries)
    assert balancer.groups[0].context.config.name.startswith("model[")


@pytest.mark.parametrize("kind", ["array", "plan", "arrangement"])
def test_placement_is_array_plan_or_arrangement(single_rank: Connection, kind: str) -> None:
    plan = equipoise.plan(np.eye(EXPERTS, dtype=int)[:LAYERS] + 1, slots=6, ranks=1)
    placement: Any = {
        "array": plan.placement.astype(np.int64),
        "plan": plan,
        "arrangement": equipoise.ExpertPlacement(plan.placement, plan.shares, 1),
    }[kind]
    model, _ = build_model(plan.placement)
    with equipoise.open_balancer(single_rank, model, placement=placement) as balancer:
        assert np.array_equal(balancer.layout.placement, plan.placement)
        even = equipoise.ExpertPlacement.with_even_shares(plan.placement, 1).shares
        assert np.array_equal(balancer.layout.shares, even if kind == "array" else plan.shares)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (np.zeros((LAYERS, EXPERTS), dtype=int), "has no slot for expert"),
        (np.zeros((1, EXPERTS), dtype=int), "a placement is int32 (3, 4), got int32 (1, 4)"),
        (np.full((LAYERS, EXPERTS), 2**32), "layer 0 names an expert outside [0, 4)"),
        (np.zeros((LAYERS, EXPERTS)), "an array of integers, not of float64"),
    ],
)
def test_placement_that_is_not_of_the_model_is_refused(
    single_rank: Connection, placement: Any, message: str
) -> None:
    model, _ = build_model(np.tile(np.arange(EXPERTS), (LAYERS, 1)))
    with pytest.raises(PlacementError) as error:
        equipoise.open_balancer(single_rank, model, placement=placement)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "layers", "numbering", "message"),
    [
        (2, (0, 1, 2), "model", "placement is of 2 ranks, the run has 1"),
        (1, (3, 5, 9), "model", "no layer 0, which model 'model' has: it is of layers 3, 5, 9"),
        (1, (2, 4, 6), "unknown", None),
        (1, (0, 1, 2), "model", None),
        (1, (0, 1, 2, 7), "model", None),
    ],
)
def test_arrangement_is_matched_by_ranks_and_layer_numbers(
    single_rank: Connection,
    ranks: int,
    layers: tuple[int, ...],
    numbering: str,
    message: str | None,
) -> None:
    slots = np.array([np.roll(np.arange(EXPERTS), at) for at in range(len(layers))], dtype=np.int32)
    placement = replace(
        equipoise.ExpertPlacement.with_even_shares(slots, ranks, layers),
        numbering=LayerNumbering(numbering),
    )
    model, _ = build_model(slots[:LAYERS])
    if message is None:
        with equipoise.open_balancer(single_rank, model, placement=placement) as balancer:
            assert np.array_equal(balancer.layout.placement, slots[:LAYERS])
        return
    with pytest.raises(PlacementError, match=message):
        equipoise.open_balancer(single_rank, model, placement=placement)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": None}, "ranks must be of type Connection, got None"),
        (
            {"model": equipoise.ModelRegistry("m", 1, 1)},
            "model must be of type ExpertModel, got an object of type ModelRegistry; ModelRegistry",
        ),
        ({"config": {"window_size": 4}}, "config must be of type BalancerConfig, got {'window_si"),
        ({"placement": [[0], [0, 1]]}, "placement is not an array: "),
        ({"staging_bytes": 1.5e6}, "staging_bytes must be a whole number, got 1500000.0"),
        ({"staging_bytes": float("nan")}, "staging_bytes must be a whole number, got nan"),
        ({"events": 3}, "events must be callable, got 3"),
        ({"metrics": 3}, "metrics must be a CollectorRegistry of prometheus_client, got 3"),
    ],
)
def test_argument_of_other_type_is_refused_by_name(
    single_rank: Connection, changes: dict[str, Any], message: str
) -> None:
    model, _ = build_model(np.tile(np.arange(EXPERTS), (LAYERS, 1)))
    with pytest.raises(EngineError) as error:
        equipoise.open_balancer(**{"ranks": single_rank, "model": model, **changes})
    assert str(error.value).startswith(message)


def test_placement_may_be_nested_lists(single_rank: Connection) -> None:
    placement = [[0, 1, 2, 3]] * LAYERS
    model, _ = build_model(placement)
    with equipoise.open_balancer(single_rank, model, placement=placement) as balancer:
        assert balancer.layout.placement.tolist() == placement
        with pytest.raises(RegistrationError, match="'model' has no layer '0' registered"):
            balancer.router("0")  # type: ignore[arg-type]


def test_staging_of_less_than_a_slot_is_refused(single_rank: Connection) -> None:
    model, _ = build_model(np.tile(np.arange(EXPERTS), (LAYERS, 1)))
    with pytest.raises(EngineError, match="1 bytes of staging are not enough"):
        equipoise.open_balancer(single_rank, model, staging_bytes=1)


def test_ranks_with_other_configurations_are_refused_on_both() -> None:
    def program(ranks: Connection, member: GroupMember) -> str:
        model, _ = build_model(equipoise.initial_placement(SHAPE)[:, here(member)])
        config = equipoise.BalancerConfig(window_size=4, step_interval=8 << member.rank)
        with pytest.raises(RanksDiffer) as error:
            equipoise.open_balancer(ranks, model, config)
        return str(error.value)

    for line in in_run(program):
        assert "step_interval" in line


def test_two_models_balance_on_one_connection(single_rank: Connection) -> None:
    placement = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    target, draft = (build_model(placement, name=name)[0] for name in ("target", "draft"))
    with (
        equipoise.open_balancer(single_rank, target) as one,
        equipoise.open_balancer(single_rank, draft) as other,
    ):
        assert (one.model.name, other.model.name) == ("target", "draft")


def test_events_come_in_order_from_a_thread_that_ends_with_the_balancer() -> None:
    def program(ranks: Connection, member: GroupMember) -> list[events.Event]:
        placement = equipoise.initial_placement(SHAPE)
        placement[:, 5] = 3
        model, _ = build_model(placement[:, here(member)])
        received: list[events.Event] = []
        with equipoise.open_balancer(
            ranks, model, QUICK, placement=placement, events=received.append
        ) as balancer:
            serve(ranks, balancer, range(STEPS))
            ranks.barrier()
        event_count = len(received)
        assert all(not one._thread.is_alive() for one in balancer.sinks)  # type: ignore[attr-defined]
        assert len(received) == event_count
        return received

    for received in in_run(program):
        states = [event.state for event in received if isinstance(event, events.StateChanged)]
        assert {"planning", "idle"} <= set(states)
        rebalances = [event for event in received if isinstance(event, events.RebalanceEnded)]
        assert "committed" in {event.record.outcome for event in rebalances}
        places = [at for at, event in enumerate(received) if isinstance(event, events.EngineClosed)]
        assert len(places) == 2, "one of each layer group"


def test_balancer_without_listeners_starts_no_thread_for_them(single_rank: Connection) -> None:
    model, _ = build_model(np.tile(np.arange(EXPERTS), (LAYERS, 1)))
    with equipoise.open_balancer(single_rank, model) as balancer:
        assert balancer.sinks == ()
        assert "equipoise.events" not in {thread.name for thread in threading.enumerate()}


def test_metrics_appear_in_given_registry(single_rank: Connection) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    model, _ = build_model(np.tile(np.arange(EXPERTS), (LAYERS, 1)))
    with equipoise.open_balancer(single_rank, model, metrics=registry):
        text = client.generate_latest(registry).decode()
    assert 'equipoise_rebalances_total{engine="model.0"} 0.0' in text
    assert 'equipoise_rebalances_total{engine="model.1"} 0.0' in text


def test_lines_of_observability_page_watch_a_loop(
    single_rank: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = pytest.importorskip("prometheus_client")
    servers: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        client, "start_http_server", lambda port, registry: servers.append((port, registry))
    )
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "observability.md").read_text("utf-8")
    section = text.partition("## A model of your own")[2].partition("\n## ")[0]
    watch_lines, trace_lines = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    forward_steps: list[int] = []
    names: dict[str, Any] = {"ranks": single_rank, "steps": 9, "forward": forward_steps.append}
    for name, lines in (("watched", watch_lines), ("traced", trace_lines)):
        names["model"], _ = build_model(np.tile(np.arange(EXPERTS), (LAYERS, 1)), name=name)
        exec(lines, names)
    assert forward_steps == [*range(9), 0]
    assert servers == [(9400, names["registry"])]
    steps = [event.step for event in names["received"] if isinstance(event, events.StepDone)]
    assert sorted(steps) == sorted([*range(9)] * len(names["model"].groups))
    assert json.loads(Path("balancer.trace.json").read_text("utf-8"))


def test_block_that_raises_closes_balancer_and_keeps_its_error(single_rank: Connection) -> None:
    model, _ = build_model(np.tile(np.arange(EXPERTS), (LAYERS, 1)))
    with pytest.raises(ZeroDivisionError), equipoise.open_balancer(single_rank, model) as balancer:
        raise ZeroDivisionError
    with pytest.raises(EngineError, match="closed"):
        balancer.before_step(0)


@settings(max_examples=200)
@given(st.integers(1, 4000), st.integers(1, 4000))
def test_default_sub_window_divides_window_and_interval(window: int, interval: int) -> None:
    if interval < window:
        with pytest.raises(ConfigError, match="shorter than window_size"):
            equipoise.BalancerConfig(window_size=window, step_interval=interval)
        return
    config = equipoise.BalancerConfig(window_size=window, step_interval=interval)
    assert window % config.sub_window == interval % config.sub_window == 0
    assert config.sub_window == default_sub_window(window, np.gcd(window, interval))


def test_default_cadence_is_short_and_shares_are_open() -> None:
    config = equipoise.BalancerConfig()
    assert (config.window_size, config.step_interval, config.sub_window) == (128, 256, 32)
    assert config.shares is None
