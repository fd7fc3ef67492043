"""The policy inside vLLM's own functions: what they pass, what they do with the answer."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.harnesses.vllm_policy import Standing, first_map, fullest, popular, standings, window
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.eplb import install
from equipoise.integrations.vllm.settings import EplbPolicySettings

pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports in its turn
    from vllm.distributed.eplb import policy as policies
    from vllm.distributed.eplb.async_worker import run_rebalance_experts
    from vllm.distributed.eplb.eplb_state import EplbStats, compute_logical_maps

    from equipoise.integrations.vllm.eplb import policy as ours
    from equipoise.integrations.vllm.eplb.policy import policy_class


STOCK = policies.DefaultEplbPolicy
POLICY = policy_class(EplbPolicySettings())
SHAPE = ExpertShape(layers=4, experts=16, slots=20, ranks=2)
UNHURRIED = settings(deadline=None)
DTYPES = torch.int32, torch.int64, torch.float32, torch.float64


def old_map() -> torch.Tensor:
    return torch.from_numpy(first_map(SHAPE)).long()


def load(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(window(popular(seed, SHAPE.layers, SHAPE.experts), seed))


def rebalance(weight: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    new_map: torch.Tensor = POLICY.rebalance_experts(weight, SHAPE.slots, 1, 1, SHAPE.ranks, old)
    return new_map


def counter_value(name: str) -> int:
    return COUNTERS.read()[name]


@pytest.fixture
def lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's loggers may or may not pass lines on to the root, where caplog listens."""
    logger = logging.getLogger("vllm.equipoise")
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@UNHURRIED
@given(standings(), st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 9))
def test_policy_plan_is_valid_for_vllm_and_never_worsens_a_layer(
    standing: Standing, dtype: torch.dtype, groups: int, nodes: int
) -> None:
    """Whatever its groups and nodes are, and whether they divide anything."""
    problem = standing.problem
    weight, old = (
        torch.from_numpy(problem.load).to(dtype),
        torch.from_numpy(standing.installed).long(),
    )
    new_map = POLICY.rebalance_experts(weight, problem.slots, groups, nodes, problem.ranks, old)
    assert (new_map.dtype, new_map.device.type, new_map.shape) == (torch.int64, "cpu", old.shape)
    slots, copies = compute_logical_maps(new_map, problem.experts)
    assert (copies > 0).all()
    assert (slots[..., 0] >= 0).all()
    before, after = (fullest(problem.load, each.numpy(), problem.ranks) for each in (old, new_map))
    assert (after <= before + 1e-6).all()


def test_policy_answers_call_of_async_worker() -> None:
    """It passes the load of logical experts, (layers, experts), whatever its docstring says."""
    stats = EplbStats(load(), SHAPE.slots, 1, 1, SHAPE.ranks)
    state: Any = SimpleNamespace(policy=POLICY)
    model: Any = SimpleNamespace(eplb_stats=stats)
    new_map = run_rebalance_experts(model, state, old_map(), None)
    assert torch.equal(new_map, rebalance(load(), old_map()))
    assert not torch.equal(new_map, old_map())


def test_policy_moves_nothing_for_zero_load() -> None:
    """So it is when the engine profiles itself."""
    moves = counter_value("eplb_policy_moved_slots")
    assert torch.equal(rebalance(torch.zeros(4, 16, dtype=torch.int64), old_map()), old_map())
    assert counter_value("eplb_policy_moved_slots") == moves


def test_policy_counts_and_logs_each_call(
    lines: pytest.LogCaptureFixture,
) -> None:
    calls, moves = counter_value("eplb_policy_calls"), counter_value("eplb_policy_moved_slots")
    new_map = rebalance(load(), old_map())
    changed_slots = int((new_map != old_map()).sum())
    assert (
        counter_value("eplb_policy_calls") - calls,
        counter_value("eplb_policy_moved_slots") - moves,
    ) == (
        1,
        changed_slots,
    )
    assert f"{changed_slots} of 80 slots move, balancedness 0." in lines.text
    assert len(lines.records) == 1


def map_of_grown_group() -> torch.Tensor:
    """The map after a rank has joined: its slots are empty."""
    old = old_map()
    old[:, 16:] = -1
    return old


def shrunk() -> torch.Tensor:
    """The map before a rank leaves: it has more slots than there will be."""
    return torch.arange(30).remainder(16).repeat(4, 1)


@pytest.mark.parametrize("old", [map_of_grown_group(), shrunk()], ids=["grows", "shrinks"])
def test_policy_defers_to_stock_policy_while_group_is_resized(
    old: torch.Tensor, lines: pytest.LogCaptureFixture
) -> None:
    moves, failures = (
        counter_value("eplb_policy_moved_slots"),
        counter_value("eplb_policy_failures"),
    )
    expected = STOCK.rebalance_experts(load(), SHAPE.slots, 1, 1, SHAPE.ranks, old)
    assert torch.equal(rebalance(load(), old), expected)
    assert "the stock policy plans" in lines.text
    assert (counter_value("eplb_policy_moved_slots"), counter_value("eplb_policy_failures")) == (
        moves,
        failures,
    )


def test_policy_plans_without_an_old_map() -> None:
    new_map = rebalance(load(), None)
    assert (compute_logical_maps(new_map, SHAPE.experts)[1] > 0).all()


def raise_memory_error(*arguments: object) -> None:
    raise MemoryError("planned")


def test_policy_exception_keeps_installed_map_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ours, "plan_placement", raise_memory_error)
    failures = counter_value("eplb_policy_failures")
    assert torch.equal(rebalance(load(), old_map().int()), old_map())
    assert counter_value("eplb_policy_failures") == failures + 1
    assert "MemoryError: planned" in lines.text


@pytest.mark.parametrize(
    "old", [None, map_of_grown_group(), shrunk()], ids=["none", "grows", "shrinks"]
)
def test_policy_exception_falls_back_to_stock_policy(
    monkeypatch: pytest.MonkeyPatch, old: torch.Tensor | None
) -> None:
    monkeypatch.setattr(ours, "integer_counts", raise_memory_error)
    failures = counter_value("eplb_policy_failures")
    expected = STOCK.rebalance_experts(load(), SHAPE.slots, 1, 1, SHAPE.ranks, old)
    assert torch.equal(rebalance(load(), old), expected)
    assert counter_value("eplb_policy_failures") == failures + 1


def test_policy_moves_nothing_for_nan_load() -> None:
    weight = load().float()
    weight[1, 2] = float("nan")
    assert torch.equal(rebalance(weight, old_map()), old_map())


def test_policy_part_replaces_default_policy_while_installed() -> None:
    with install.install_policy(EplbPolicySettings(target=0.5)):
        policy = policies.EPLB_POLICIES["default"]
        assert issubclass(policy, ours.IncrementalEplbPolicy)
        assert policy.settings.target == 0.5
        with install.install_policy(EplbPolicySettings(target=0.25)):
            again = policies.EPLB_POLICIES["default"]
            assert (again.settings.target, again.stock) == (0.25, STOCK)
    assert policies.EPLB_POLICIES == {"default": STOCK}


def test_policy_part_restores_third_party_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(policies.DefaultEplbPolicy):  # type: ignore[misc]
        pass

    monkeypatch.setitem(policies.EPLB_POLICIES, "default", Theirs)
    install.restore_policy()
    assert policies.EPLB_POLICIES["default"] is Theirs
    with install.install_policy(EplbPolicySettings()):
        assert policies.EPLB_POLICIES["default"].stock is Theirs
    assert policies.EPLB_POLICIES["default"] is Theirs


@pytest.mark.timeout(900)
def test_vllm_rearrangement_moves_only_predicted_bytes(tmp_path: Path) -> None:
    """Two ranks, its own rearrangement: an expert that stays on its rank stays in its slot."""
    results = np.array(_ranks(tmp_path / "meeting"), dtype=np.int64)
    received_bytes, predicted_bytes, right = (
        results.sum(axis=0)[:, 0],
        results[0, :, 1],
        results[..., 2],
    )
    assert right.all()
    assert (results[0, :, 1] == results[1, :, 1]).all()
    assert (received_bytes == predicted_bytes).all()
    assert (received_bytes[0] > 0, received_bytes[1], received_bytes[2] > 0) == (True, 0, True)


def _ranks(meeting: Path) -> list[list[list[int]]]:
    """Results of both ranks, by window."""
    path = os.pathsep.join(filter(None, sys.path))
    more = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    completed = subprocess.run(
        [sys.executable, "-m", "engines.vllm.runs.policy_rearrangement", str(meeting)],
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        text=True,
        timeout=800,
        check=True,
    )
    results: list[list[list[int]]] = json.loads(completed.stdout.splitlines()[-1])
    return results
