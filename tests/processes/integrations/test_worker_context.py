"""The context of an engine's worker, over processes."""

from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import engine_context


def test_worker_that_leaves_at_once_strands_no_late_rank(ranks: Ranks) -> None:
    """It holds the store: the late one would have looked for it until the deadline."""
    answers = ranks.run(engine_context.first_rank_leaves_at_once, 2)
    assert [answer["error"] for answer in answers] == ["", ""]
