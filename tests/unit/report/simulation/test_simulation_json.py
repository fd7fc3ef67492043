"""The figures of a simulation as JSON."""

import json
from collections.abc import Callable
from pathlib import Path

from equipoise import __version__
from equipoise.balancer.requests.policy_settings import Predictor
from equipoise.report.simulation.json_output import json_value, to_json
from equipoise.report.simulation.result import SimulationResult


def test_simulation_json_round_trips_without_nan(simulation_result: SimulationResult) -> None:
    values = to_json(simulation_result)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["equipoise"] == __version__
    assert set(values["versions"]) == {"python", "numpy"}
    assert values["subject"]["cluster"]["workers"] == 3
    assert values["subject"]["requests"]["count"] == 80


def test_simulation_json_names_best_policy_of_each_figure(
    simulation_result: SimulationResult,
) -> None:
    best = to_json(simulation_result)["best"]
    assert best["imbalance"]["policy"] in simulation_result.labels
    assert set(best["imbalance"]["indistinguishable"]) <= set(simulation_result.labels)
    assert "bound" not in best


def test_simulation_json_reference_is_default_or_first_policy(
    simulation_result: SimulationResult, simulate_small: Callable[..., SimulationResult]
) -> None:
    assert to_json(simulation_result)["reference"] == "fit"
    other = to_json(simulate_small(policies=("jsq", "br0")))
    assert other["reference"] == "jsq"
    assert other["policies"]["jsq"]["beside_reference"] is None
    assert other["policies"]["br0"]["beside_reference"]["idle"]["mean"] is not None


def test_simulation_json_has_balance_and_wait_distributions(
    simulation_result: SimulationResult,
) -> None:
    policy = to_json(simulation_result)["policies"]["fit"]
    assert len(policy["balance"]["values"]) == len(policy["balance"]["quantiles"])
    assert len(policy["wait_by_size"]["seconds"]) == 10


def test_to_json_converts_python_values() -> None:
    values = {"a": Path("x"), 1: (float("nan"), 0.5), "e": Predictor.ORACLE, "b": True, "n": None}
    assert json_value(values) == {"a": "x", "1": [None, 0.5], "e": "oracle", "b": True, "n": None}
