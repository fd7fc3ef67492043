"""Dictionaries between stages: what engines' calls come to."""

from typing import Any

from helpers.processes.ranks import Ranks
from helpers.rank_programs import tensor_dicts
from helpers.strategies.drawing import few
from hypothesis import given
from hypothesis import strategies as st

from equipoise.pipeline.framing import LEAST, FirstParts

FEW = few(25)
DTYPES = st.sampled_from(["float32", "bfloat16", "int64", "uint8", "bool", "float16"])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 64, 200]), max_size=2)
FIELDS = st.lists(
    st.tuples(st.sampled_from(["hidden", "residual", "x"]), SHAPES, DTYPES),
    max_size=3,
    unique_by=lambda field: field[0],
)
CONSTANTS = st.dictionaries(
    st.sampled_from(["n", "word"]), st.integers(0, 3) | st.text("ab", max_size=2) | st.none()
)
STEPS = st.lists(st.tuples(FIELDS, CONSTANTS), min_size=1, max_size=5).flatmap(
    lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=10)
)


@FEW
@given(STEPS, st.integers(2, 3), st.integers(0, 1), st.booleans())
def test_dictionaries_of_any_kind_in_any_order_arrive_as_they_were_handed_over(
    ranks: Ranks, steps: list[Any], size: int, lag: int, inference: bool
) -> None:
    """Empty ones, empty tensors, strided ones, numbers and words, growing and shrinking; of
    engines that call in inference mode, which holds for their thread and not for ours."""
    settings: dict[str, Any] = {"steps": steps, "lag": lag, "inference": inference}
    answers = ranks.run(tensor_dicts.hand_around, size, **settings)
    assert answers == [[]] * size


def test_steps_that_are_alike_take_one_message_each_and_no_pickle_and_no_memory(
    ranks: Ranks,
) -> None:
    sender, receiver = ranks.run(tensor_dicts.steady, 2, steps=20)
    assert sender == {"isend": 20}
    assert receiver == {"irecv": 20}


def test_what_is_declared_alike_goes_in_slices_and_arrives_whole(ranks: Ranks) -> None:
    answers = ranks.run(tensor_dicts.sliced, 4, chosen=None)
    assert [answer["error"] for answer in answers[:2]] == ["", ""]
    expected = [
        {"alike": [[n, n + 1], [n + 2, n + 3], [n + 4, n + 5]], "odd": [n, n + 1, n + 2]}
        for n in range(3)
    ]
    assert answers[2:] == [expected] * 2


def test_what_is_declared_not_alike_travels_whole_from_each_rank(ranks: Ranks) -> None:
    answers = ranks.run(tensor_dicts.sliced, 4, chosen={"own": False})
    assert [step["own"] for step in answers[2]] == [[0, n] for n in range(3)]
    assert [step["own"] for step in answers[3]] == [[1, n] for n in range(3)]


def test_a_tensor_of_each_rank_among_slices_is_refused_each_time(ranks: Ranks) -> None:
    """The default of engines is to slice everything that can be divided."""
    assert ranks.run(tensor_dicts.refused, 4) == [["NotReplicated"] * 2] * 2 + [[]] * 2


def test_edges_that_there_are_not_are_named(ranks: Ranks) -> None:
    answers = ranks.run(tensor_dicts.nobody_there, 3)
    assert [answer[2:] for answer in answers] == [[True, False], [False, False], [False, True]]
    for answer in answers:
        assert all("there is no edge" in text for text in answer[:2])


def test_an_engine_that_is_idle_loses_no_edge(ranks: Ranks) -> None:
    _, receiver = ranks.run(tensor_dicts.idle, 2, deadline=0.5, seconds=0.8)
    assert receiver == [0, 1, 2]


def test_what_nobody_reads_does_not_stop_what_comes_behind_it(ranks: Ranks) -> None:
    _, receiver = ranks.run(tensor_dicts.unread, 2, steps=12)
    assert receiver == list(range(1, 12, 2))


@given(st.lists(st.integers(0, 10**9), max_size=20), st.integers(1, 4))
def test_both_ends_know_the_same_size_for_every_first_part(sizes: list[int], ahead: int) -> None:
    parts, told = FirstParts(ahead), []
    for size in sizes:
        told.append(parts.use())
        parts.seen(size)
    assert told[:ahead] == [LEAST] * min(ahead, len(sizes))
    assert all(t >= LEAST for t in told)
    steady, firsts = FirstParts(ahead), []
    for _ in range(ahead + 1):
        firsts.append(steady.use())
        steady.seen(LEAST + 5)
    assert firsts[-1] == LEAST + 5
