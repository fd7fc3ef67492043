"""`equipoise run --placement`: what it is served with, and what it is refused for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer import formats
from equipoise.balancer.formats import ExpertPlacement
from equipoise.demo.settings import EXPERTS, LAYERS, RunSettings

pytestmark = pytest.mark.slow


def arrangement(
    layers: int = LAYERS, experts: int = EXPERTS, slots: int = 40, ranks: int = 4
) -> ExpertPlacement:
    placement = np.tile(np.arange(slots, dtype=np.int32) % experts, (layers, 1))
    return ExpertPlacement.with_even_shares(placement, ranks)


@pytest.fixture(autouse=True)
def placements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "good": arrangement(),
        "wide": arrangement(slots=48),
        "eight": arrangement(ranks=8),
        "few": arrangement(experts=16, slots=32),
        "shallow": arrangement(layers=4),
        "deep": arrangement(layers=8),
    }
    for name, layout in files.items():
        formats.write_placement(f"{name}.json", layout)
    formats.write_placement("good.yaml", arrangement())
    formats.write_placement("good.npy", arrangement())
    placement = arrangement().placement
    formats.write_placement(
        "odd.json", ExpertPlacement.with_even_shares(placement, 4, (0, 1, 2, 3, 4, 9))
    )
    formats.write_statistics(
        "counts.npz", formats.ExpertStatistics(np.ones((1, 6, 32), dtype=np.int64))
    )


@pytest.mark.parametrize("name", ["good.json", "good.yaml", "good.npy", "wide.json"])
def test_run_placement_sets_slots_from_any_format(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], name: str
) -> None:
    answer = equipoise("run", "--placement", name, "--quiet")
    assert answer.code == 0, answer.err
    [settings] = launched_settings
    assert settings.placement == Path(name)
    assert settings.slots == formats.read_placement(name, ranks=4).slots


def test_run_placement_is_reported_in_table_and_figures(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings]
) -> None:
    answer = equipoise("run", "--placement", "good.json", "--out", "o", "--quiet")
    assert "* placement        0.0000" in answer.out
    assert "served unchanged: nothing moved" in answer.out
    assert "rebalances" not in answer.out
    assert answer.out.splitlines()[-1] == "outputs identical: yes"
    figures = json.loads(Path("o/summary.json").read_text())
    assert figures["shares"] == "placement"
    assert figures["imbalance_placement"] == figures["imbalance_balanced"] == 0.0
    assert figures["imbalance_static"] is None
    assert figures["placement"] == arrangement().digest
    assert figures["not_exercised"] is None
    assert figures["measured_from_step"] == 0


BAD = {
    "missing": (("none.json",), "--placement: none.json: cannot be read"),
    "statistics": (("counts.npz",), "--placement: counts.npz: is statistics (format npz)"),
    "other ranks": (("eight.json",), "--placement: eight.json: is for 8 ranks, not 4"),
    "other ranks asked for": (("good.json", "--ranks", "2"), "is for 4 ranks, not 2"),
    "other experts": (("few.json",), "few.json: places 16 experts, and the model has 32 a layer"),
    "too few layers": (("shallow.json",), "shallow.json: has no layer 4: the model has 6"),
    "too many layers": (
        ("deep.json",),
        "deep.json: has layer 7, and the model has 6, counted from",
    ),
    "other layers": (("odd.json",), "odd.json: has no layer 5: the model has 6"),
    "other slots": (("good.json", "--slots", "48"), "has 40 slots, and --slots is 48"),
    "other redundant experts": (
        ("good.json", "--num-redundant-experts", "4"),
        "has 40 slots, and --slots is 36",
    ),
    "window": (
        ("good.json", "--window-size", "9"),
        "--window-size has no meaning with --placement",
    ),
    "log": (("good.json", "--log-rebalances"), "--log-rebalances has no meaning with --placement"),
    "shares": (("good.json", "--shares", "static"), "--shares has no meaning with --placement"),
    "an interval": (("good.json", "--step-interval", "9"), "--step-interval has no meaning with"),
    "a target": (
        ("good.json", "--target", "0"),
        "--target has no meaning with --placement: nothing",
    ),
    "a budget": (
        ("good.json", "--staging-bytes", "9MiB"),
        "--staging-bytes has no meaning with --placement",
    ),
    "without it": (
        ("good.json", "--variants", "unbalanced"),
        "--variants must include placement, which the run is about; got unbalanced",
    ),
    "no rank": (("good.yaml", "--ranks", "0"), "--ranks must be 1 to 64"),
    "ranks that do not divide": (("good.yaml", "--ranks", "5"), "--ranks 5 does not divide 32"),
    "ranks that do not divide the slots": (("good.yaml", "--ranks", "16"), "good.yaml: "),
    "an output over it": (
        ("good.json", "--json", "good.json"),
        "--json: good.json is the file that --placement is read from",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_run_rejects_unservable_placement_with_one_line(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    answer = equipoise("run", "--placement", *arguments)
    assert (answer.code, answer.out) == (2, "")
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert launched_settings == []


def test_run_placement_accepts_equal_slots_option(
    equipoise: Callable[..., Any], launched_settings: list[object]
) -> None:
    assert equipoise("run", "--placement", "wide.json", "--slots", "48", "--quiet").code == 0


def test_run_placement_is_read_from_config_file(
    equipoise: Callable[..., Any], launched_settings: list[RunSettings], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("placement: wide.json\nquiet: true\n")
    assert equipoise("run", "--config", "run.yaml").code == 0
    assert [settings.slots for settings in launched_settings] == [48]


def test_run_placement_accepts_fewer_steps_than_window(
    equipoise: Callable[..., Any], launched_settings: list[object]
) -> None:
    assert equipoise("run", "--placement", "good.json", "--steps", "3", "--quiet").code == 0
