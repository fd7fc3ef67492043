"""Which placements fit a model, and which variants a run serves with one."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.balancer.formats import ExpertPlacement, write_placement
from equipoise.demo.model import ModelConfig
from equipoise.demo.placement_file import read_placement_file
from equipoise.demo.settings import Balance, RunSettings, Shares
from equipoise.demo.variant import variants_of_run
from equipoise.hal.errors import FormatError

CONFIG = ModelConfig()
PLACED = RunSettings(placement=Path("p.json"), slots=48)


def test_run_without_placement_reads_no_layout() -> None:
    assert read_placement_file(RunSettings(), CONFIG) is None


def test_run_placement_and_shares_equal_file(tmp_path: Path) -> None:
    placement = np.tile(np.arange(40, dtype=np.int32) % CONFIG.experts, (CONFIG.layers, 1))
    even = ExpertPlacement.with_even_shares(placement, 4)
    shares = even.shares.copy()
    shares[:, 0], shares[:, CONFIG.experts] = 1, 65535
    write_placement(tmp_path / "p.json", ExpertPlacement(placement, shares, 4))
    layout = read_placement_file(RunSettings(placement=tmp_path / "p.json"), CONFIG)
    assert layout is not None
    assert np.array_equal(layout.placement, placement)
    assert np.array_equal(layout.shares, shares)


def test_ranks_reject_placement_that_does_not_fit_model(tmp_path: Path) -> None:
    placement = np.arange(32, dtype=np.int32)[None]
    write_placement(tmp_path / "p.json", ExpertPlacement.with_even_shares(placement, 4))
    with pytest.raises(FormatError, match=r"p\.json: has no layer 1: the model has 6"):
        read_placement_file(RunSettings(placement=tmp_path / "p.json"), CONFIG)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (RunSettings(balance=Balance.OFF), ["unbalanced 32"]),
        (PLACED, ["unbalanced 32", "placement 48"]),
        (
            RunSettings(shares=Shares.LAGGED),
            ["unbalanced 32", "static 40", "local 40", "exact 40", "lagged 40"],
        ),
    ],
)
def test_run_variants_end_with_requested_one(settings: RunSettings, names: list[str]) -> None:
    assert [f"{variant.name} {variant.slots}" for variant in variants_of_run(settings, 32)] == names


def test_only_share_mode_variants_are_balanced() -> None:
    assert [variant.balanced for variant in variants_of_run(PLACED, 32)] == [False, False]
    assert [variant.balanced for variant in variants_of_run(RunSettings(), 32)] == [
        False,
        True,
        True,
        True,
        True,
    ]
