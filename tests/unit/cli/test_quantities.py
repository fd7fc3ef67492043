"""Bytes with units, and one number per rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from equipoise.byte_sizes import MAX_BYTES, UNITS, bytes_of_text, bytes_of_value
from equipoise.cli.kinds import (
    numbers_of_text,
    numbers_of_yaml,
    resolve_numbers,
)
from equipoise.hal.errors import UsageError


def refuses(reader: Callable[[Any], object], value: object) -> bool:
    """Whether the reader raises the error that readers of options raise."""
    try:
        reader(value)
    except ValueError:
        return True
    return False


def test_bytes_of_text_accepts_decimal_and_binary_units() -> None:
    bytes_by_text = {
        "7": 7,
        "44M": 44 * 10**6,
        "24MiB": 24 << 20,
        "1.5GiB": 3 << 29,
        "2kB": 2000,
        "600KiB": 600 << 10,
        "600ki": 600 << 10,
        "1TB": 10**12,
    }
    assert {text: bytes_of_text(text) for text in bytes_by_text} == bytes_by_text


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", "B"]))
def test_bytes_of_text_multiplies_count_by_unit(count: int, unit: str, mark: str) -> None:
    expected = count * UNITS[unit]
    if expected <= MAX_BYTES:
        assert bytes_of_text(f"{count}{unit}{mark}") == expected
        assert bytes_of_value(expected) == expected


BAD = (
    "",
    "B",
    "M",
    "-1",
    "0",
    "1.5",
    "0.3k5",
    "1 M",
    "1m",
    "1KB",
    "1K",
    "1e9",
    "nan",
    "9E",
    "99999999T",
    "\u0663",
)


@pytest.mark.parametrize("text", BAD)
def test_bytes_of_text_rejects_fractional_or_malformed_text(text: str) -> None:
    assert refuses(bytes_of_text, text)
    assert refuses(bytes_of_value, text)


@pytest.mark.parametrize("value", [True, 0, -5, 1.5, None, [1], MAX_BYTES + 1])
def test_bytes_of_value_rejects_invalid_values(value: object) -> None:
    assert refuses(bytes_of_value, value)


def test_numbers_option_is_a_list_or_a_file_path() -> None:
    assert numbers_of_text("1") == (1.0,)
    assert numbers_of_text("1,.5") == (1.0, 0.5)
    assert numbers_of_text("ranks.txt") == Path("ranks.txt")
    assert numbers_of_yaml([1, 0.5]) == numbers_of_yaml("1,.5")
    for bad_value in ([], [True], ["1"], 3, None):
        assert refuses(numbers_of_yaml, bad_value)


def test_numbers_file_must_have_one_number_per_rank(tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    path.write_text("1,2\n3\t4,\n")
    assert resolve_numbers("--x", path, 4) == (1, 2, 3, 4)
    with pytest.raises(UsageError, match="ranks: 4 numbers for 5 ranks"):
        resolve_numbers("--x", path, 5)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        resolve_numbers("--x", tmp_path, 5)


def test_numbers_list_accepts_exponents_and_rejects_words() -> None:
    assert numbers_of_yaml(yaml.safe_load("[1, 5e-1, 0.25]")) == (1.0, 0.5, 0.25)
    for text in ("[1, half]", "[1, true]", f"[1{'0' * 400}]"):
        with pytest.raises(ValueError, match=r"half|True|10"):
            numbers_of_yaml(yaml.safe_load(text))
