"""The native store that the host signals a device with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise import _native


@given(st.integers(1, 9), st.integers(0, 8), st.integers(-(2**31), 2**31 - 1))
def test_store_release_writes_its_own_word_only(size: int, place: int, value: int) -> None:
    words = np.zeros(size, dtype=np.int32)
    place %= size
    _native.store_release_system(words[place : place + 1], value)
    assert words.tolist() == [value * (number == place) for number in range(size)]


@pytest.mark.parametrize(
    "word",
    [np.zeros(2, np.int32), np.zeros(1, np.int64), np.zeros((1, 1), np.int32)],
    ids=["two words", "int64", "two dimensions"],
)
def test_store_release_refuses_other_shapes_and_dtypes(word: NDArray[np.int32]) -> None:
    with pytest.raises(ValueError, match=r"^word: expected "):
        _native.store_release_system(word, 1)
    assert not word.any()
