"""The pool of ranks: what every other test of this folder stands on."""

import mmap
import os
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.processes import shared_memory
from helpers.processes.rank_pool import Case, Ranks, RanksFailed
from helpers.processes.shared_memory import left_since, segments
from helpers.rank_programs import rank_pool as harness


def test_rank_pool_quotes_exceptions_and_replaces_ranks(
    ranks: Ranks,
) -> None:
    before = ranks.run(harness.where_am_i, 2, word="")
    with pytest.raises(RanksFailed, match=r"rank 1:\n(?s:.*)ValueError: rank 1 was told to"):
        ranks.run(harness.raise_on, 2, rank=1)
    assert pids(ranks.run(harness.where_am_i, 2, word="")).isdisjoint(pids(before))


def test_rank_pool_replaces_ranks_spoiled_by_a_case(ranks: Ranks) -> None:
    name = f"{harness.where_am_i.__module__}:{harness.where_am_i.__qualname__}"
    case = Case(program=name, size=2, arguments={"word": ""}, spoils=True)
    assert pids(ranks.play(case)).isdisjoint(pids(ranks.play(case)))


def test_rank_pool_fails_case_when_a_rank_dies_unexpectedly() -> None:
    pool = Ranks()
    try:
        with pytest.raises(RanksFailed, match="rank 0 was killed by SIGKILL"):
            pool.run(harness.die_on, 1, rank=0)
        assert pool.members == {}
    finally:
        pool.close()


def test_rank_pool_replaces_only_the_rank_lost_on_purpose(ranks: Ranks) -> None:
    before = ranks.run(harness.where_am_i, 2, word="")
    assert ranks.run(harness.die_on, 2, rank=1, lost=[1]) == ["fine", None]
    after = ranks.run(harness.where_am_i, 2, word="")
    assert after[0] == before[0]
    assert after[1]["pid"] != before[1]["pid"]


def test_rank_pool_ends_hanging_ranks_and_shows_stacks() -> None:
    memory = segments()
    pool = Ranks()
    try:
        pids = [a["pid"] for a in pool.run(harness.where_am_i, 2, word="")]
        with pytest.raises(RanksFailed, match=r"no answer within 0.5 s(?s:.*)in hang"):
            pool.run(harness.hang, 2, watchdog=0.5)
    finally:
        pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert left_since(memory) == set()


def pids(answers: Sequence[dict[str, Any]]) -> set[int]:
    return {answer["pid"] for answer in answers}


def test_shared_memory_check_lists_only_unmapped_segments() -> None:
    before = segments()
    unmapped_path, mapped_path = (
        shared_memory.FOLDER / f"equipoise-{uuid.uuid4().hex}" for _ in range(2)
    )
    for path in (unmapped_path, mapped_path):
        path.write_bytes(bytes(4096))
    try:
        with mapped_path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert left_since(before) == {unmapped_path}
    finally:
        unmapped_path.unlink()
        mapped_path.unlink()
    assert left_since(before) == set()
