"""`equipoise simulate`: the table, the figures, the report, and what each option comes to."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.paths import ROOT

from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.simulation_run import SimulationMetrics
from equipoise.cli.config import read_config
from equipoise.cli.simulate import COMMAND, SimulateRequest
from equipoise.cli.simulate_setup import known_policies
from equipoise.report.simulation.table import WIDTH

CONFIGS = ROOT / "examples" / "configs"
SMALL = (
    "simulate", "--workload", "sharegpt", "--requests", "80", "--workers", "3",
    "--slots-per-worker", "4", "--seeds", "2", "--policies", "round_robin,br0,fit",
)  # fmt: skip


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take seconds, and most tests look at none."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_svg", None)


@pytest.mark.slow
def test_simulate_prints_table_and_writes_figures_and_report(
    equipoise: Callable[..., Any], tmp_path: Path
) -> None:
    answer = equipoise(*SMALL)
    assert answer.code == 0
    assert answer.out.startswith("sharegpt: 80 requests on 3 workers of 4 slots; 3 policies, 2 se")
    assert "half of the 95 % confidence interval over 2 seeds" in answer.out
    assert max(map(len, answer.out.splitlines())) <= WIDTH
    folder = Path("equipoise-simulate")
    assert answer.err.splitlines()[-2:] == [
        f"figures: {folder / 'summary.json'}",
        f"report: {folder / 'report.html'}",
    ]
    summary = json.loads((tmp_path / folder / "summary.json").read_text())
    assert summary["command"] == "equipoise " + " ".join(SMALL)
    assert summary["settings"]["slots_per_worker"] == 4
    assert (summary["reference"], summary["seeds"]) == ("fit", [0, 1])
    assert list(summary["policies"]) == ["round_robin", "br0", "fit"]
    page = (tmp_path / folder / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "--slots-per-worker 4" in page


@pytest.mark.usefixtures("no_plots")
def test_simulate_figures_have_seeds_intervals_and_differences(
    equipoise: Callable[..., Any],
) -> None:
    assert equipoise(*SMALL, "--json", "f.json", "--quiet").code == 0
    policies = json.loads(Path("f.json").read_text())["policies"]
    for policy_summary in policies.values():
        assert (
            set(policy_summary["figures"])
            == set(policy_summary["intervals"])
            == set(SimulationMetrics.names())
        )
        assert all(len(values) == 2 for values in policy_summary["figures"].values())
        values = policy_summary["figures"]["throughput"]
        assert policy_summary["intervals"]["throughput"]["mean"] == pytest.approx(sum(values) / 2)
    assert policies["fit"]["beside_reference"] is None
    ours, theirs = (policies[name]["figures"]["idle"] for name in ("fit", "round_robin"))
    relative = [b / a - 1 for a, b in zip(ours, theirs, strict=True)]
    beside = policies["round_robin"]["beside_reference"]["idle"]
    assert beside["mean"] == pytest.approx(sum(relative) / 2)
    assert policies["fit"]["settings"]["window"] == RoutingPolicySettings().window


@pytest.mark.usefixtures("no_plots")
def test_simulate_repeats_figures_for_same_command(equipoise: Callable[..., Any]) -> None:
    texts = []
    for _ in range(2):
        assert equipoise(*SMALL, "--noise", "0.1", "--quiet").code == 0
        texts.append(Path("equipoise-simulate/summary.json").read_text())
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("no_plots")
def test_simulate_without_matplotlib_writes_table_and_figures(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise(*SMALL, "--quiet")
    assert answer.code == 0
    assert "round_robin" in answer.out
    assert answer.err == (
        "equipoise: warning: no report: matplotlib is missing: "
        "pip install '.[plots]' in a clone of equipoise\n"
    )
    assert os.listdir("equipoise-simulate") == ["summary.json"]


@pytest.mark.usefixtures("no_plots")
def test_simulate_one_seed_has_no_intervals(equipoise: Callable[..., Any]) -> None:
    answer = equipoise(*SMALL, "--seeds", "1", "--json", "f.json", "--quiet")
    assert "\u00b1" not in answer.out
    assert "one seed: no intervals, and no difference can be told from chance" in answer.out
    summary = json.loads(Path("f.json").read_text())
    assert summary["policies"]["fit"]["intervals"]["idle"]["half"] is None


@pytest.mark.usefixtures("no_plots")
def test_simulate_default_policies_are_all_with_oracle(equipoise: Callable[..., Any]) -> None:
    words = ("simulate", "--workload", "sharegpt", "--requests", "30", "--workers", "2")
    answer = equipoise(*words, "--slots-per-worker", "2", "--seeds", "1", "--json", "f.json")
    assert answer.code == 0
    policies = json.loads(Path("f.json").read_text())["policies"]
    assert tuple(policies) == known_policies()
    assert policies["brh_oracle"]["settings"]["predictor"] == "oracle"


@pytest.mark.usefixtures("no_plots")
def test_simulate_counts_requests_that_never_fit_as_failed(equipoise: Callable[..., Any]) -> None:
    answer = equipoise(*SMALL, "--kv-tokens", "300", "--json", "f.json", "--quiet")
    assert answer.code == 0
    assert "failed" in answer.out
    failed_shares = json.loads(Path("f.json").read_text())["policies"]["fit"]["figures"]["failed"]
    assert all(0 < part < 1 for part in failed_shares)


def test_simulate_writes_all_outputs_when_every_request_fails(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise(*SMALL, "--kv-tokens", "1", "--sweep", "workers", "--points", "1,2")
    assert answer.code == 3
    assert answer.err.splitlines()[-1] == (
        "equipoise: error: every request failed, with every policy: "
        "--kv-tokens 1 let none be served"
    )
    assert "no policy is better than another at anything" in answer.out
    summary = json.loads(Path("equipoise-simulate/summary.json").read_text())
    assert summary["policies"]["fit"]["figures"]["failed"] == [1.0, 1.0]
    assert summary["policies"]["fit"]["figures"]["throughput"] == [None, None]
    assert "<h1>" in Path("equipoise-simulate/report.html").read_text()


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("over", "points", "heads"),
    [
        ("load", "0.5,1.1", "throughput, tokens/s, by load"),
        ("workers", "2,4", "gap, %, by workers"),
    ],
)
def test_simulate_sweep_prints_table_and_figures(
    equipoise: Callable[..., Any], over: str, points: str, heads: str
) -> None:
    sweep = ("--sweep", over, "--points", points)
    answer = equipoise(*SMALL, *sweep, "--json", "f.json", "--quiet")
    assert heads in answer.out
    sweep_summary = json.loads(Path("f.json").read_text())["sweep"]
    assert sweep_summary["over"] == over
    assert [point["value"] for point in sweep_summary["points"]] == [
        float(x) for x in points.split(",")
    ]
    assert set(sweep_summary["points"][0]["policies"]) == {"round_robin", "br0", "fit"}


@pytest.mark.slow
def test_simulate_sweep_adds_picture_to_report(equipoise: Callable[..., Any]) -> None:
    answer = equipoise(*SMALL, "--sweep", "workers", "--points", "1,2", "--html", "r.html")
    assert answer.code == 0
    page = Path("r.html").read_text()
    assert page.count("<svg") == 6
    assert "More workers" in page


def test_simulate_options_match_request_fields() -> None:
    names = {field.name for field in fields(SimulateRequest)}
    assert set(COMMAND.options) == names


@pytest.mark.usefixtures("no_plots")
def test_simulate_command_line_overrides_config_file(
    equipoise: Callable[..., Any],
) -> None:
    Path("c.yaml").write_text(
        "workload: sharegpt\nrequests: 40\nworkers: 2\nslots_per_worker: 3\nseeds: 1\n"
        "policies: [jsq, fit]\nload: 0.5\nquiet: true\n"
    )
    answer = equipoise("simulate", "--config", "c.yaml", "--workers", "3")
    assert answer.code == 0
    assert answer.out.startswith("sharegpt: 40 requests on 3 workers of 3 slots; 2 policies")
    assert "requests come at random at 0.5 of the capacity" in answer.out


@pytest.mark.usefixtures("no_plots")
def test_simulate_small_example_config_runs(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("simulate", "--config", str(CONFIGS / "simulate-small.yaml"), "--quiet")
    assert (answer.code, os.listdir("simulate-small")) == (0, ["summary.json"])
    assert answer.out.startswith("sharegpt: 600 requests on 4 workers of 8 slots; 6 policies")


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_simulate_example_configs_are_valid(size: str) -> None:
    from equipoise.cli.simulate_setup import set_up_trial, validate

    path = CONFIGS / f"simulate-{size}.yaml"
    options = read_config(path, COMMAND.options)
    assert set(options) == set(yaml.safe_load(path.read_text()))
    request = SimulateRequest(**options)
    validate(request)
    assert set_up_trial(request, None).trial.seeds


def test_simulate_help_lists_every_option(
    equipoise: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        equipoise("simulate", "--help-all")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for option in COMMAND.options.values():
        assert option.name in text, option.name
