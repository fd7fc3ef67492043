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
@given(original=statistics())
def test_statistics_round_trip_except_reported_losses(
    name: str, suffix: str, original: ExpertStatistics
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"s{suffix}"
        loss_message = formats.write_statistics(path, original, name) or ""
        statistics_read = formats.read_statistics(path)
    if name == "sglang":  # whose layers without rows are dense ones
        original = original.without_empty_layers()
    assert np.array_equal(_counts_of_original_layers(statistics_read, original), original.counts)
    comparisons = (
        (
            FileContent.LAYERS,
            statistics_read.layers == original.layers or not original.counts.any(),
        ),
        (
            FileContent.ITERATIONS,
            statistics_read.first_iteration
            == (original.first_iteration or statistics_read.first_iteration),
        ),
        (FileContent.TOP_K, statistics_read.top_k == original.top_k),
        (FileContent.BY_RANK, original.by_rank is None or statistics_read.by_rank is not None),
    )
    assert [
        content for content, is_equal in comparisons if not is_equal and content not in loss_message
    ] == []


@pytest.mark.parametrize(("name", "suffix"), PLACEMENT_FILES)
@given(original=arrangements())
def test_arrangement_round_trips_except_reported_losses(
    name: str, suffix: str, original: ExpertPlacement
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"p{suffix}"
        loss_message = formats.write_placement(path, original, name) or ""
        placement_read = formats.read_placement(path, ranks=original.ranks)
    if name == "sglang":
        assert np.array_equal(placement_read.placement[list(original.layers)], original.placement)
    else:
        assert np.array_equal(placement_read.placement, original.placement)
        assert (FileContent.SHARES in loss_message) == (
            not original.is_even and name != "equipoise"
        )
        assert placement_read.layers == original.layers or FileContent.LAYERS in loss_message
    assert placement_read.ranks == original.ranks
    if name == "equipoise":
        assert placement_read.same(original)
        assert not loss_message


@given(original=statistics())
def test_equipoise_statistics_round_trip_without_loss(original: ExpertStatistics) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.npz"
        assert formats.write_statistics(path, original) is None
        assert formats.read_statistics(path).same(original)


def test_even_shares_are_never_reported_lost(tmp_path: Path) -> None:
    layout = ExpertPlacement.with_even_shares(small_arrangement().placement, 3, (1, 3))
    for number, (name, suffix) in enumerate(PLACEMENT_FILES):
        loss_message = formats.write_placement(tmp_path / f"{number}{suffix}", layout, name)
        assert "shares" not in (loss_message or "")


def test_write_placement_returns_loss_message_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss_message = formats.write_placement(tmp_path / "a.yaml", small_arrangement())
    assert loss_message == "tensorrt-llm does not carry shares, the number of ranks: lost"
    assert capsys.readouterr() == ("", "")


def test_plan_digest_survives_placement_file(tmp_path: Path) -> None:
    proposal = plan(np.random.default_rng(7).integers(0, 99, (3, 8)), slots=12, ranks=4)
    path = tmp_path / "placement.json"
    formats.write_placement(path, ExpertPlacement(proposal.placement, proposal.shares, 4))
    assert formats.read_placement(path).digest == proposal.digest


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
        placement_read = formats.read_placement(tmp_path / "a.data")
        assert np.array_equal(placement_read.placement, layout.placement)


def test_known_formats_are_unique_by_kind_and_name() -> None:
    known_formats: tuple[Format, ...] = formats.known_formats()
    pairs = [(type(known_format), known_format.name) for known_format in known_formats]
    assert len(set(pairs)) == len(pairs)
    assert {"tensorrt-llm", "vllm", "vllm-ascend", "sglang", "eplb-table"} <= {n for _, n in pairs}


def _counts_of_original_layers(
    statistics_read: ExpertStatistics, original: ExpertStatistics
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """SGLang's files have a row for every layer up to the last."""
    if statistics_read.counts.shape == original.counts.shape:
        return statistics_read.counts
    return statistics_read.counts[:, list(original.layers)]
