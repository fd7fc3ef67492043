"""`equipoise run` around a run that takes no time."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.processes.ports import free_port

from equipoise.cli.run_options import BY_KEY
from equipoise.demo import launcher
from equipoise.demo.expert_parallel import SlotWeights
from equipoise.demo.model.config import ModelConfig
from equipoise.demo.settings import EXPERTS, LAYERS, SLOT_BYTES, RunSettings
from equipoise.demo.variant import variants_of_run
from equipoise.hal.errors import RankLost

pytestmark = pytest.mark.slow


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without matplotlib draws no report, which takes longer than all the rest."""
    for name in ("matplotlib", "matplotlib.backends.backend_svg"):
        monkeypatch.setitem(sys.modules, name, None)


def test_run_prints_verdict_and_writes_figures_and_report(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    answer = equipoise("run")
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "outputs identical: yes"
    figures = json.loads((tmp_path / "equipoise-run" / "summary.json").read_text())
    assert figures["imbalance_unbalanced"] == pytest.approx(0.6)
    assert "<svg" in (tmp_path / "equipoise-run" / "report.html").read_text()
    assert launched_settings == [RunSettings()]


def test_run_writes_figures_and_report_to_given_paths(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    assert equipoise("run", "--json", "a/f.json", "--html", "b/r.html", "--quiet").code == 0
    assert (tmp_path / "a" / "f.json").exists()
    assert "equipoise run --json a/f.json" in (tmp_path / "b" / "r.html").read_text()
    assert [path.name for path in (tmp_path / "equipoise-run").iterdir()] == ["record.npz"]


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ((), False),
        (("--steps", "72"), False),
        (("--steps", "71"), True),
        (("--step-interval", "16"), True),
        (("--steps", "10", "--variants", "unbalanced"), False),
        (("--steps", "10", "--ranks", "1"), False),
    ],
)
def test_run_says_before_it_serves_that_steps_are_too_few(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    options: tuple[str, ...],
    warned: bool,
) -> None:
    answer = equipoise("run", *options)
    assert ("steps may be too few for 2 rebalances" in answer.err) is warned


@pytest.mark.usefixtures("no_report")
def test_run_writes_trace_to_given_path(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    answer = equipoise("run", "--trace", "t/trace.json")
    assert answer.code == 0
    trace = json.loads((tmp_path / "t" / "trace.json").read_text())
    assert trace["otherData"]["shares"] == "local"
    assert "trace: t/trace.json" in answer.err


def test_run_rejects_trace_path_used_by_json(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    answer = equipoise("run", "--trace", "same", "--json", "same")
    assert answer.code == 2
    assert "--trace: same is the file that --json is written to" in answer.err
    assert launched_settings == []


@pytest.mark.usefixtures("no_report")
def test_run_passes_on_metrics_and_log_options(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    port = free_port(RunSettings().ranks)
    (tmp_path / "run.yaml").write_text(f"metrics_port: {port}\nlog_balancedness: true\n")
    words = ("--config", "run.yaml", "--log-balancedness-interval", "5", "--log-rebalances")
    assert equipoise("run", *words).code == 0
    (settings,) = launched_settings
    assert settings.metrics_port == port
    assert settings.log_balancedness
    assert settings.log_balancedness_interval == 5
    assert settings.log_rebalances


@pytest.mark.usefixtures("no_report")
def test_run_prints_rank_memory_before_first_step(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    lines = equipoise("run").err.splitlines()
    assert lines[0] == "device memory of a rank:"
    assert lines.index(next(line for line in lines if "total" in line)) < lines.index(
        next(line for line in lines if "steps" in line)
    )


def test_run_quiet_prints_only_the_table(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    loud, quiet = equipoise("run"), equipoise("run", "--quiet")
    assert "unbalanced (1 of 6): 12/12 steps, summed imbalance 0.250" in loud.err
    assert quiet.err == ""
    assert quiet.out == loud.out


@pytest.mark.usefixtures("no_report")
def test_run_without_balancing_compares_outputs(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    answer = equipoise("run", "--variants", "unbalanced")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "outputs identical: yes")


@pytest.mark.parametrize(
    ("words", "served", "about"),
    [
        ((), ["unbalanced", "static", "lagged", "local", "exact"], "local"),
        (
            ("--nodes", "2"),
            ["unbalanced", "static", "lagged", "local", "node", "exact"],
            "local",
        ),
        (("--variants", "node"), ["node"], "node"),
        (("--variants", "exact"), ["exact"], "exact"),
        (
            ("--variants", "lagged", "unbalanced", "static"),
            ["unbalanced", "static", "lagged"],
            "lagged",
        ),
        (("--variants", "lagged", "exact", "--shares", "lagged"), ["lagged", "exact"], "lagged"),
        (("--variants", "static", "--routing-rule", "vllm"), ["static"], "static"),
        (("--variants", "unbalanced"), ["unbalanced"], "none"),
    ],
)
@pytest.mark.usefixtures("no_report")
def test_run_serves_only_requested_variants(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    tmp_path: Path,
    words: tuple[str, ...],
    served: list[str],
    about: str,
) -> None:
    answer = equipoise("run", "--quiet", *words)
    assert answer.code == 0
    assert [variant.name for variant in variants_of_run(launched_settings[0], EXPERTS)][-1] in (
        about,
        "unbalanced",
    )
    assert {variant.name for variant in variants_of_run(launched_settings[0], EXPERTS)} == set(
        served
    )
    figures = json.loads((tmp_path / "equipoise-run" / "summary.json").read_text())
    assert set(figures["variants"]) == set(served)
    assert figures["shares"] == about
    rows = [line for line in answer.out.splitlines() if line.endswith("  identical")]
    assert [row[2:].split()[0] for row in rows] == served
    assert [row.startswith("*") for row in rows] == [name == about for name in served]


@pytest.mark.usefixtures("no_report")
def test_run_serves_variants_of_config_file(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("variants: [unbalanced, exact]\n")
    (tmp_path / "one.yaml").write_text("variants: exact\n")
    assert equipoise("run", "--config", "run.yaml").code == 0
    assert equipoise("run", "--config", "one.yaml").code == 0
    assert [settings.variants for settings in launched_settings] == [
        ("unbalanced", "exact"),
        ("exact",),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--variants", "exact", "fast"),
            "--variants: expected a variant (unbalanced, placement, static, lagged, "
            "local, node, exact), got 'fast'",
        ),
        (
            ("--variants", "placement"),
            "--variants placement cannot be served without --placement; "
            "known: unbalanced, static, lagged, exact, local",
        ),
        (
            ("--variants", "node", "exact"),
            "--variants node cannot be served with --nodes 1, unless --shares is node; "
            "known: unbalanced, static, lagged, local, exact",
        ),
        (
            ("--variants", "exact", "--routing-rule", "vllm"),
            "--variants exact cannot be served with --routing-rule vllm; known: unbalanced, static",
        ),
        (
            ("--variants", "unbalanced", "static", "--shares", "exact"),
            "--variants must include exact, which the run is about (--shares); "
            "got unbalanced, static",
        ),
        (("--variants", "unbalanced", "unbalanced"), "--variants names unbalanced twice"),
        (
            ("--variants", "unbalanced", "--log-rebalances"),
            "--log-rebalances has no meaning with --variants unbalanced: there is no rebalance",
        ),
        (
            ("--variants", "unbalanced", "--target", "0.1"),
            "--target has no meaning with --variants unbalanced: nothing is planned",
        ),
    ],
)
def test_run_unservable_variants_exit_2(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    words: tuple[str, ...],
    message: str,
) -> None:
    answer = equipoise("run", *words)
    assert answer.code == 2
    assert answer.err.splitlines() == [f"equipoise: error: {message}"]
    assert launched_settings == []


def test_run_rejects_unknown_variant_in_config(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("variants: [exact, fast]\n")
    answer = equipoise("run", "--config", "run.yaml")
    assert answer.code == 2
    assert "run.yaml: key 'variants': expected a variant (unbalanced, placement," in answer.err
    assert launched_settings == []


def test_run_without_matplotlib_succeeds_and_names_extra(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    no_report: None,
    tmp_path: Path,
) -> None:
    answer = equipoise("run", "--quiet")
    assert answer.code == 0
    assert answer.err.splitlines() == [
        "equipoise: no report: matplotlib is missing: "
        "pip install '.[plots]' in a clone of equipoise"
    ]
    assert (tmp_path / "equipoise-run" / "summary.json").exists()
    assert not (tmp_path / "equipoise-run" / "report.html").exists()


def test_run_lost_rank_exits_3_with_one_line(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        raise RankLost(2, "was killed", "dispatch")

    monkeypatch.setattr(launcher, "run_demo", lose)
    answer = equipoise("run", "--quiet")
    assert answer.code == 3
    assert answer.err.splitlines() == ["equipoise: error: rank 2 was killed during dispatch"]


def test_run_interrupt_exits_130_with_one_line(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "run_demo", interrupt)
    answer = equipoise("run", "--quiet")
    assert (answer.code, answer.err) == (130, "equipoise: interrupted\n")


def test_run_as_nonzero_external_rank_prints_no_table(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "run_demo", lambda *_: None)
    answer = equipoise("run")
    assert (answer.code, answer.out) == (0, "")


def test_run_prints_table_when_figures_cannot_be_written(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = equipoise("run", "--quiet")
    assert answer.code == 3
    assert answer.out.splitlines()[-1] == "outputs identical: yes"
    [line] = answer.err.splitlines()
    assert "summary.json cannot be written: No space left on device; " in line
    assert line.endswith("report.html cannot be written: No space left on device")


@pytest.mark.parametrize("flag", ["--trace", "--json", "--html"])
def test_run_writes_other_outputs_when_one_fails(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path, flag: str
) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full here")
    outputs = {"--trace": "o/trace.json", "--json": "o/f.json", "--html": "o/r.html"}
    words = [word for pair in {**outputs, flag: "/dev/full"}.items() for word in pair]
    answer = equipoise("run", "--out", "o", *words)
    assert answer.code == 3
    assert answer.out.splitlines()[-1] == "outputs identical: yes"
    last = answer.err.splitlines()[-1]
    assert last == "equipoise: error: /dev/full cannot be written: No space left on device"
    expected_files = {Path(path).name for name, path in outputs.items() if name != flag} | {
        "record.npz"
    }
    assert {path.name for path in (tmp_path / "o").iterdir()} == expected_files
    assert "/dev/full" not in "\n".join(answer.err.splitlines()[:-1])


def test_run_writes_trace_last(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    replace = Path.replace

    def recording_replace(path: Path, target: Path) -> Path:
        order.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", recording_replace)
    assert equipoise("run", "--trace", "t.json").code == 0
    assert order == ["summary.json", "report.html", "t.json"]


def test_run_help_shows_every_option_with_default(capsys: pytest.CaptureFixture[str]) -> None:
    from equipoise.cli.main import main

    with pytest.raises(SystemExit) as exit_info:
        main(["run", "--help-all"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in BY_KEY.values():
        assert option.name in text
        assert f"default: {option.shown_default})" in text


def test_run_settings_constants_match_model_config() -> None:
    assert ModelConfig().experts == EXPERTS
    assert ModelConfig().layers == LAYERS
    assert SlotWeights(ModelConfig(), 2).layer_group().slot_bytes == SLOT_BYTES
