"""The host pool between processes: shared, sealed, never mixed, and nothing is left of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.harnesses.host_pool import holdings
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import host_pool as pools

from equipoise.balancer.experts.host_pool.shared_memory import MEMORY_NAME

WORDS = {
    0: ("layout", "offer", "reserved", "filled", "sealed", "verified"),
    1: ("layout", "answer", "reserved", "filled", "verified"),
}
"""What the owner of the memory, and another rank, say in turn."""


@pytest.fixture(autouse=True)
def nothing_named_is_left() -> Iterator[None]:
    """Whatever happens, no name appears where shared memory has one."""
    before = set(Path("/dev/shm").iterdir())
    yield
    assert {
        path for path in set(Path("/dev/shm").iterdir()) - before if MEMORY_NAME in path.name
    } == set()


@pytest.mark.parametrize("over_socket", [False, True])
def test_host_pool_shares_one_memory_and_leaves_nothing(ranks: Ranks, over_socket: bool) -> None:
    for answer in ranks.run(pools.share, 3, over_socket=over_socket):
        assert answer == {"holds": True, "ranks": [0, 1, 2], "during": [1, 1], "after": [0, 0]}


def test_host_pool_memory_ends_with_its_processes() -> None:
    ranks = Ranks()
    try:
        inodes = set(ranks.run(pools.keep, 3))
        members = [member.pid for member in ranks.members.values()]
        assert [holdings(pid) for pid in members] == [(1, 1)] * 3
        assert len(inodes) == 1
        assert users(inodes) == set(members)
    finally:
        ranks.close()  # by SIGKILL
    assert users(inodes) == set()


@pytest.mark.parametrize(
    ("victim", "word"), [(victim, n) for victim, words in WORDS.items() for n in range(len(words))]
)
def test_host_pool_survivors_name_killed_rank_and_hold_nothing(
    ranks: Ranks, victim: int, word: int
) -> None:
    answers = ranks.run(pools.die_instead_of, 3, lost=[victim], victim=victim, word=word)
    for rank in {0, 1, 2} - {victim}:
        assert answers[rank]["ended"]["error"] == "BallotIncomplete"
        missing_ranks = answers[rank]["ended"]["text"].partition("no word from rank(s)")[2]
        assert str(victim) in missing_ranks
        assert answers[rank]["holdings"] == [0, 0]


@pytest.mark.parametrize("victim", [0, 1])
def test_host_pool_reader_of_sealed_pool_outlives_other_ranks(ranks: Ranks, victim: int) -> None:
    answers = ranks.run(pools.outlive, 3, lost=[victim], victim=victim)
    assert [answers[rank] for rank in {0, 1, 2} - {victim}] == [True, True]


def test_host_pools_of_two_jobs_stay_apart(ranks: Ranks) -> None:
    answers = ranks.run(pools.instances, 4)
    assert [answer["holds"] for answer in answers] == [True] * 4
    assert [answer["ranks"] for answer in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_host_pool_refuses_token_of_another_instance(ranks: Ranks) -> None:
    for refusal, right in ranks.run(pools.steal, 2):
        assert refusal["error"] == "PoolMismatch"
        assert "header is of another pool" in refusal["text"]
        assert right["error"] == ""


def test_host_pool_seal_fails_while_a_writer_is_left(ranks: Ranks) -> None:
    for answer in ranks.run(pools.hoard, 2):
        assert answer["error"] == "ExpertPoolError"
        assert answer["text"].startswith("rank 0: the pool cannot be sealed")


def users(inodes: set[int]) -> set[int]:
    """Processes of this machine that have one of these memories mapped."""
    process_ids = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        if any(MEMORY_NAME in line and int(line.split()[4]) in inodes for line in lines):
            process_ids.add(int(process.name))
    return process_ids
