"""A seed has a stream of its own for each purpose."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from equipoise.balancer.requests.workload import RandomStream, random_generator


@given(st.integers(0, 2**80))
def test_seed_streams_differ_by_purpose_and_repeat(seed: int) -> None:
    firsts = [
        random_generator(seed, purpose).bit_generator.random_raw() for purpose in RandomStream
    ]
    assert len(set(firsts)) == len(RandomStream)
    assert firsts == [
        random_generator(seed, purpose).bit_generator.random_raw() for purpose in RandomStream
    ]


@given(st.integers(0, 2**80))
def test_seed_stream_of_sizes_is_the_seed_itself(seed: int) -> None:
    assert (
        random_generator(seed, RandomStream.SIZES).bit_generator.random_raw()
        == np.random.PCG64(seed).random_raw()
    )
