"""Flat hashes and their offsets fit the prompts, and follow them."""

import numpy as np
import pytest

from equipoise.balancer.requests.workload import (
    BlockHashes,
    Counts,
    check_block_hashes,
    select_hashes,
)
from equipoise.hal.errors import UsageError


def counts(*values: int) -> Counts:
    """As int64."""
    return np.array(values, dtype=np.int64)


PROMPTS = counts(513, 512)
IDS = counts(4, 5, 6)


@pytest.mark.parametrize(
    ("hashes", "words"),
    [
        ((IDS, counts(0, 3)), "2 offsets of hashes, expected 3"),
        ((IDS, counts(0, 2, 4)), "offsets of hashes do not rise from 0 to 3"),
        ((IDS, counts(1, 2, 3)), "do not rise"),
        ((IDS, counts(0, 4, 3)), "do not rise"),
        ((IDS, counts(0, 3, 3)), "request 0: 3 hashes for 513 tokens in blocks of 512"),
        ((IDS, counts(0, 1, 3)), "request 1: 2 hashes for 512 tokens"),
        ((counts(4, -5, 6), counts(0, 2, 3)), "hash 1 is -5, below 0"),
        ((IDS.astype(np.float64), counts(0, 2, 3)), "two int64 arrays of one axis"),
        ((IDS.reshape(1, 3), counts(0, 2, 3)), "two int64 arrays of one axis"),
    ],
)
def test_check_hashes_refuses_misfit_hashes(hashes: BlockHashes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_block_hashes(hashes, PROMPTS, 512)


def test_check_hashes_accepts_last_block_with_or_without_hash() -> None:
    for offsets in (counts(0, 2, 3), counts(0, 1, 2), counts(0, 0, 1)):
        ids = IDS[: offsets[-1]]
        check_block_hashes((ids, offsets), PROMPTS, 512)
        assert select_hashes((ids, offsets), counts(0, 1))[0].tolist() == ids.tolist()


def test_chosen_hashes_follow_repeated_and_reordered_rows() -> None:
    ids, offsets = select_hashes((IDS, counts(0, 2, 2, 3)), counts(2, 1, 0, 2))
    assert ids.tolist() == [6, 4, 5, 6]
    assert offsets.tolist() == [0, 1, 1, 3, 4]
