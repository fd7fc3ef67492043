"""Channels between NPUs of the simulated driver: streams read, and messages follow streams."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks.cases import channels
from support.ranks import Case, Ranks

pytestmark = pytest.mark.npusim
FEW = settings(
    max_examples=8,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
ROWS = st.lists(st.integers(0, channels.MOST), min_size=1, max_size=8)


def played(ranks: Ranks, size: int, **arguments: object) -> list[dict[str, object]]:
    return ranks.play(
        Case(
            program="ranks.cases.channels:stream_of_steps",
            size=size,
            arguments={**arguments, "backend": "ascend"},
            communicator="equipoise.backends.ascend:HCCL",
        )
    )


@FEW
@given(ROWS, st.integers(1, 3).flatmap(lambda d: st.tuples(st.just(d), st.integers(1, d))))
def test_steps_arrive_whole_though_their_source_is_written_over(
    ranks: Ranks, rows: list[int], buffers: tuple[int, int]
) -> None:
    depth, ahead = buffers
    for answer in played(ranks, 2, rows=rows, depth=depth, ahead=ahead, parts=1):
        assert answer["wrong"] == []
        assert (answer["messages"], answer["buffers"]) == (len(rows), 0)


@FEW
@given(ROWS)
def test_slices_are_gathered_to_what_was_sent(ranks: Ranks, rows: list[int]) -> None:
    for answer in played(ranks, 4, rows=rows, depth=2, ahead=2, parts=2):
        assert answer["wrong"] == []
        assert answer["messages"] == len(rows)
