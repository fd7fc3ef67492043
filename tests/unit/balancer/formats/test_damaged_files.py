"""Damaged files give one FormatError or a value, and never another exception."""

import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from helpers.strategies.format_samples import (
    PLACEMENT_FILES,
    STATISTICS_FILES,
    file_of_arrangement,
    file_of_statistics,
    small_arrangement,
)
from hypothesis import given

from equipoise.balancer import formats
from equipoise.balancer.formats.registry import FOLDER_SUFFIX
from equipoise.hal.errors import FormatError

pytestmark = pytest.mark.slow

Damage = Callable[[bytes], bytes]
PLAIN = [(name, suffix) for name, suffix in STATISTICS_FILES if suffix != FOLDER_SUFFIX]
SMALL = {".npz", ".safetensors", ".npy"}


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Cut off, bytes changed, bytes in between, or all of it something else."""
    kind = draw(st.sampled_from(["cut", "flip", "insert", "replace"]))
    at, value = draw(st.integers(0, 10**6)), draw(st.binary(min_size=1, max_size=4))

    def damage(data: bytes) -> bytes:
        place = at % max(len(data), 1)
        if kind == "cut":
            return data[:place]
        if kind == "insert":
            return data[:place] + value + data[place:]
        if kind == "flip":
            return data[:place] + value + data[place + len(value) :]
        return value * (1 + at % 50)

    return damage


@pytest.mark.parametrize(("name", "suffix"), PLAIN)
@given(damage=damages())
def test_damaged_statistics_file_raises_format_error_or_reads(
    name: str, suffix: str, damage: Damage
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = file_of_statistics(Path(folder), name, suffix)
        _read_damaged(path, damage, lambda: formats.read_statistics(path))


@pytest.mark.parametrize("name", ["meta_info.json", "rank0.safetensors", "rank1.safetensors"])
@given(damage=damages())
def test_damaged_statistics_folder_raises_format_error_or_reads(name: str, damage: Damage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = file_of_statistics(Path(folder), "tensorrt-llm", FOLDER_SUFFIX)
        _read_damaged(path / name, damage, lambda: formats.read_statistics(path))


@pytest.mark.parametrize(("name", "suffix"), PLACEMENT_FILES)
@given(damage=damages())
def test_damaged_placement_raises_format_error_or_reads(
    name: str, suffix: str, damage: Damage
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = file_of_arrangement(Path(folder), name, suffix)
        _read_damaged(path, damage, lambda: formats.read_placement(path, ranks=3))


@given(damage=damages())
def test_damaged_equipoise_placement_is_refused_or_unchanged(damage: Damage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = file_of_arrangement(Path(folder), "equipoise", ".json")
        path.write_bytes(damage(path.read_bytes()))
        try:
            placement = formats.read_placement(path)
        except FormatError as error:
            _check_line(error)
        else:
            assert placement.same(small_arrangement())


@given(damage=damages())
def test_damaged_torch_file_raises_format_error_or_reads(damage: Damage) -> None:
    stream = io.BytesIO()
    torch.save({"logical_count": torch.arange(6).reshape(1, 2, 3), "rank": 0}, stream)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        path.write_bytes(stream.getvalue())
        _read_damaged(path, damage, lambda: formats.read_statistics(path))


@given(
    data=st.binary(max_size=200),
    suffix=st.sampled_from([*SMALL, ".json", ".yaml", ".csv", ".pt", ".x"]),
)
def test_junk_file_raises_format_error_or_reads(data: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        path.write_bytes(data)
        for read in (formats.read_statistics, formats.read_placement):
            try:
                value: object = read(path)
            except FormatError as error:
                _check_line(error)
            else:
                assert value is not None


def _read_damaged(path: Path, damage: Damage, read: Callable[[], object]) -> None:
    path.write_bytes(damage(path.read_bytes()))
    try:
        contents = read()
    except FormatError as error:
        _check_line(error)
    else:
        assert contents is not None


def _check_line(error: FormatError) -> None:
    assert "\n" not in str(error)
    assert len(error.what) < 300
