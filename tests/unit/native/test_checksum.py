"""The native checksum against a slow rendering of its definition, and what it notices."""

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from equipoise import _native

MASK = 2**64 - 1


def mix(x: int) -> int:
    x ^= x >> 32
    x = x * 0xC92A4895548C7445 & MASK
    x ^= x >> 29
    x = x * 0xB33D02297CFAF58D & MASK
    return x ^ x >> 32


def slow_checksum(data: bytes) -> int:
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
    terms = [mix(w + (i + 1) * 0x9E3779B97F4A7C15 & MASK) for i, w in enumerate(words)]
    return (mix(~len(data) & MASK) + sum(terms)) & MASK


@given(st.binary(max_size=200))
def test_checksum_equals_definition(data: bytes) -> None:
    assert _native.checksum(data) == slow_checksum(data)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksum_detects_one_changed_bit(data: bytes, choice: st.DataObject) -> None:
    other_data = bytearray(data)
    other_data[choice.draw(st.integers(0, len(data) - 1))] ^= 1 << choice.draw(st.integers(0, 7))
    assert _native.checksum(bytes(other_data)) != _native.checksum(data)


@given(st.lists(st.binary(min_size=4, max_size=4), min_size=2, max_size=40), st.data())
def test_checksum_detects_swapped_words(words: list[bytes], choice: st.DataObject) -> None:
    a, b = (choice.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    assume(words[a] != words[b])
    other_words = list(words)
    other_words[a], other_words[b] = words[b], words[a]
    assert _native.checksum(b"".join(other_words)) != _native.checksum(b"".join(words))


@given(st.binary(max_size=100), st.integers(1, 9))
def test_checksum_detects_appended_zeros(data: bytes, zeros: int) -> None:
    assert _native.checksum(data + bytes(zeros)) != _native.checksum(data)


@given(st.binary(min_size=8, max_size=100), st.integers(0, 7))
def test_checksum_of_numpy_and_torch_views_agree(data: bytes, offset: int) -> None:
    array = np.frombuffer(bytearray(data), dtype=np.uint8)[offset:]
    tensor = torch.from_numpy(array)
    assert _native.checksum(array) == _native.checksum(tensor) == slow_checksum(data[offset:])
