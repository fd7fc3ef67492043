"""Streams of an engine's: an exception in one program does not end them (clause E7)."""

import pytest
from helpers.fakes import synchronous_runtime as immediate

from equipoise.hal.errors import StreamFailed


def _raise() -> None:
    raise ValueError("a hook of ours")


def test_adopted_stream_raises_at_the_launch_and_goes_on() -> None:
    stream, values = immediate.stream(adopted=True), list[int]()
    with pytest.raises(StreamFailed, match="a hook of ours") as error:
        stream.launch(_raise)
    assert isinstance(error.value.__cause__, ValueError)
    stream.launch(lambda: values.append(1))
    stream.synchronize(1.0)
    assert values == [1]


def test_own_stream_fails_for_good_when_a_program_raises() -> None:
    stream, values = immediate.stream(), list[int]()
    stream.launch(_raise)
    for _ in range(2):
        with pytest.raises(StreamFailed, match="a hook of ours"):
            stream.launch(lambda: values.append(1))
    assert values == []
