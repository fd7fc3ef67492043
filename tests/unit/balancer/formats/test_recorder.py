"""What a rank's recorder writes, when, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.formats import IterationRange, StatisticsRecorder, read_statistics, recorder
from equipoise.hal.errors import FileWriteFailed, FormatError, PlacementError

LAYERS, EXPERTS = (3, 5), 4
TEN_TO_13 = IterationRange(10, 13)


def make(
    folder: str | Path, rank: int = 0, ranks: int = 1, iterations: IterationRange = TEN_TO_13
) -> StatisticsRecorder:
    return StatisticsRecorder(
        folder,
        rank=rank,
        ranks=ranks,
        iterations=iterations,
        layers=LAYERS,
        experts=EXPERTS,
        top_k=2,
    )


def test_recorder_accepts_path_as_string(tmp_path: Path) -> None:
    """A string passed the check, and the first use of it was an AttributeError."""
    text_recorder = make(str(tmp_path / "recorded"))
    text_recorder.record(10, counts(10))
    assert text_recorder.close() == recorder.Partial(IterationRange(10, 11))
    assert read_statistics(tmp_path / "recorded").layers == LAYERS


def counts(iteration: int, rank: int = 0) -> np.ndarray:
    return np.arange(8, dtype=np.int32).reshape(2, EXPERTS) + 100 * iteration + 1000 * rank


def test_recorder_files_of_all_ranks_are_read_back(tmp_path: Path) -> None:
    for rank in range(3):
        rank_recorder = make(tmp_path / "recorded", rank, 3)
        for iteration in range(8, 16):
            rank_recorder.record(iteration, counts(iteration, rank))
        assert rank_recorder.close() == recorder.Complete(TEN_TO_13)
    statistics = read_statistics(tmp_path / "recorded")
    expected = [[counts(i, rank) for i in range(10, 13)] for rank in range(3)]
    assert statistics.by_rank is not None
    assert np.array_equal(statistics.by_rank, expected)
    assert (statistics.layers, statistics.first_iteration, statistics.top_k) == (LAYERS, 10, 2)


def test_recorder_writes_file_only_after_its_range(tmp_path: Path) -> None:
    one = make(tmp_path)
    for iteration in range(13):
        one.record(iteration, counts(iteration))
        assert list(tmp_path.iterdir()) == []
    one.record(13, counts(13))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "meta_info.json",
        "rank0.safetensors",
    ]


def test_recorder_writes_meta_info_on_first_rank_only(tmp_path: Path) -> None:
    one = make(tmp_path, rank=1, ranks=2)
    one.record(10, counts(10))
    one.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.safetensors"]


def test_recorder_adds_parts_of_an_iteration_and_fills_gaps_with_zeros(tmp_path: Path) -> None:
    rank_recorder = make(tmp_path)
    rank_recorder.record(10, counts(10))
    rank_recorder.record(10, counts(10))
    rank_recorder.record(12, counts(12))
    rank_recorder.close()
    read_counts = read_statistics(tmp_path).counts
    assert np.array_equal(read_counts, [2 * counts(10), np.zeros((2, EXPERTS)), counts(12)])


def test_recorder_closed_early_returns_recorded_range(tmp_path: Path) -> None:
    one = make(tmp_path)
    one.record(10, counts(10))
    one.record(11, counts(11))
    assert one.close() == recorder.Partial(IterationRange(10, 12))
    assert one.close() == recorder.Partial(IterationRange(10, 12))
    assert read_statistics(tmp_path).windows == 2


@pytest.mark.parametrize(
    "recorded_iterations", [[], [8, 9], [13, 14]], ids=["nothing", "too early", "too late"]
)
def test_recorder_writes_nothing_outside_its_range(
    recorded_iterations: list[int], tmp_path: Path
) -> None:
    rank_recorder = make(tmp_path)
    for iteration in recorded_iterations:
        rank_recorder.record(iteration, counts(iteration))
    assert rank_recorder.close() == recorder.Empty()
    assert list(tmp_path.iterdir()) == []


def test_recorder_copies_counts_it_is_given(tmp_path: Path) -> None:
    one, buffer = make(tmp_path), counts(10)
    one.record(10, buffer)
    buffer[:] = 0
    one.close()
    assert np.array_equal(read_statistics(tmp_path).counts[0], counts(10))


BAD_COUNTS = {
    "another shape": (
        np.zeros((2, 5), dtype=np.int64),
        r"int64 \(2, 5\), expected integers \(2, 4",
    ),
    "fractions": (np.zeros((2, 4)), "counts are float64"),
    "a negative count": (np.full((2, 4), -3), "iteration 11: count -3 is negative"),
}


@pytest.mark.parametrize(("bad_counts", "message"), BAD_COUNTS.values(), ids=BAD_COUNTS.keys())
def test_recorder_refuses_bad_counts_and_keeps_earlier_ones(
    bad_counts: np.ndarray, message: str, tmp_path: Path
) -> None:
    rank_recorder = make(tmp_path)
    rank_recorder.record(10, counts(10))
    with pytest.raises(PlacementError, match=message):
        rank_recorder.record(11, bad_counts)
    rank_recorder.close()
    assert np.array_equal(read_statistics(tmp_path).counts, [counts(10)])


def test_recorder_refuses_descending_iterations(tmp_path: Path) -> None:
    one = make(tmp_path)
    one.record(11, counts(11))
    with pytest.raises(PlacementError, match="iteration 10 comes after iteration 11"):
        one.record(10, counts(10))


@pytest.mark.parametrize("name", ["meta_info.json", "rank0.safetensors", "rank2.safetensors"])
def test_recorder_refuses_folder_with_another_recording(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(FormatError, match=f"has {name} already"):
        make(tmp_path, rank=0, ranks=2)
    assert (tmp_path / name).read_text() == ""


def test_recorder_accepts_files_of_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "rank1.safetensors").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert make(tmp_path, rank=0, ranks=2).state == recorder.Waiting()


def test_recorder_refuses_too_long_range_before_allocating(
    tmp_path: Path,
) -> None:
    with pytest.raises(FormatError, match=r"0-999999999 take \d+ bytes a rank, at most"):
        make(tmp_path / "new", iterations=IterationRange(0, 999_999_999))
    assert not (tmp_path / "new").exists()


def test_recorder_refuses_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileWriteFailed, match="cannot be made"):
        make(tmp_path / "file" / "deeper")


@pytest.mark.parametrize("rank", [-1, 2])
def test_recorder_refuses_rank_out_of_range(rank: int, tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=f"rank {rank} of 2 cannot record"):
        make(tmp_path, rank=rank, ranks=2)


@given(
    start=st.integers(0, 20),
    length=st.integers(1, 8),
    recorded_iterations=st.sets(st.integers(0, 30)),
)
def test_recorder_writes_exactly_the_counts_fed_within_range(
    start: int, length: int, recorded_iterations: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("recorded")
    iterations = IterationRange(start, start + length)
    rank_recorder = make(folder, iterations=iterations)
    for iteration in sorted(recorded_iterations):
        rank_recorder.record(iteration, counts(iteration))
    inside = {i: counts(i) for i in recorded_iterations if i in iterations}
    match rank_recorder.close():
        case recorder.Empty():
            assert not inside
        case recorder.Complete(written_range) | recorder.Partial(written_range):
            statistics = read_statistics(folder)
            assert statistics.iteration_range == written_range
            assert (written_range == iterations) == (
                max(recorded_iterations) >= iterations.stop - 1
            )
            nothing = np.zeros((2, EXPERTS))
            rows = [inside.get(i, nothing) for i in range(written_range.start, written_range.stop)]
            assert np.array_equal(statistics.counts, rows)
