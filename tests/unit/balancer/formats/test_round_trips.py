"""What is written is read back, but for what the warning says is lost."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.strategies.format_samples import (
    PLACEMENT_FILES,
    STATISTICS_FILES,
    arrangements,
    small_arrangement,
    statistics,
)
from hypothesis import given

from equipoise.balancer import formats
from equipoise.balancer.experts import plan
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.registry import FileContent, Format
from equipoise.balancer.formats.statistics import ExpertStatistics

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "suffix"), STATISTICS_FILES)
@given(written=statistics())
def test_statistics_round_trip_except_reported_losses(
    name: str, suffix: str, written: ExpertStatistics
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"s{suffix}"
        lost = formats.write_statistics(path, written, name) or ""
        found = formats.read_statistics(path)
    if name == "sglang":  # whose layers without rows are dense ones
        written = written.without_empty_layers()
    assert np.array_equal(_shown(found, written), written.counts)
    told = (
        (FileContent.LAYERS, found.layers == written.layers or not written.counts.any()),
        (
            FileContent.ITERATIONS,
            found.first_iteration == (written.first_iteration or found.first_iteration),
        ),
        (FileContent.TOP_K, found.top_k == written.top_k),
        (FileContent.BY_RANK, written.by_rank is None or found.by_rank is not None),
    )
    assert [what for what, kept in told if not kept and what not in lost] == []


@pytest.mark.parametrize(("name", "suffix"), PLACEMENT_FILES)
@given(written=arrangements())
def test_arrangement_round_trips_except_reported_losses(
    name: str, suffix: str, written: ExpertPlacement
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"p{suffix}"
        lost = formats.write_placement(path, written, name) or ""
        found = formats.read_placement(path, ranks=written.ranks)
    if name == "sglang":
        assert np.array_equal(found.placement[list(written.layers)], written.placement)
    else:
        assert np.array_equal(found.placement, written.placement)
        assert (FileContent.SHARES in lost) == (not written.is_even and name != "equipoise")
        assert found.layers == written.layers or FileContent.LAYERS in lost
    assert found.ranks == written.ranks
    if name == "equipoise":
        assert found.same(written)
        assert not lost


@given(written=statistics())
def test_equipoise_statistics_round_trip_without_loss(written: ExpertStatistics) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.npz"
        assert formats.write_statistics(path, written) is None
        assert formats.read_statistics(path).same(written)


def test_even_shares_are_never_reported_lost(tmp_path: Path) -> None:
    layout = ExpertPlacement.with_even_shares(small_arrangement().placement, 3, (1, 3))
    for number, (name, suffix) in enumerate(PLACEMENT_FILES):
        lost = formats.write_placement(tmp_path / f"{number}{suffix}", layout, name)
        assert "shares" not in (lost or "")


def test_write_placement_returns_loss_message_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = formats.write_placement(tmp_path / "a.yaml", small_arrangement())
    assert lost == "tensorrt-llm does not carry shares: lost"
    assert capsys.readouterr() == ("", "")


def test_plan_digest_survives_placement_file(tmp_path: Path) -> None:
    found = plan(np.random.default_rng(7).integers(0, 99, (3, 8)), slots=12, ranks=4)
    path = tmp_path / "placement.json"
    formats.write_placement(path, ExpertPlacement(found.placement, found.shares, 4))
    assert formats.read_placement(path).digest == found.digest


def test_write_placement_is_deterministic(tmp_path: Path) -> None:
    for number, (name, suffix) in enumerate(PLACEMENT_FILES):
        paths = [tmp_path / f"{number}{copy}{suffix}" for copy in "ab"]
        for path in paths:
            formats.write_placement(path, small_arrangement(), name)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_read_placement_detects_format_by_content(tmp_path: Path) -> None:
    layout = small_arrangement()
    for suffix in (".json", ".npz"):
        formats.write_placement(tmp_path / f"a{suffix}", layout)
        shutil.move(tmp_path / f"a{suffix}", tmp_path / "a.data")
        found = formats.read_placement(tmp_path / "a.data")
        assert np.array_equal(found.placement, layout.placement)


def test_known_formats_are_unique_by_kind_and_name() -> None:
    known: tuple[Format, ...] = formats.known_formats()
    pairs = [(type(form), form.name) for form in known]
    assert len(set(pairs)) == len(pairs)
    assert {"tensorrt-llm", "vllm", "vllm-ascend", "sglang", "eplb-table"} <= {n for _, n in pairs}


def _shown(
    found: ExpertStatistics, written: ExpertStatistics
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """SGLang's files have a row for every layer up to the last."""
    if found.counts.shape == written.counts.shape:
        return found.counts
    return found.counts[:, list(written.layers)]
