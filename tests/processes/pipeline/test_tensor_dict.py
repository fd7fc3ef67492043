"""Dictionaries between stages: what engines' calls come to."""

from typing import Any

from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import tensor_dicts
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st

from equipoise.pipeline.channel.framing import MIN_FIRST_PART_BYTES, FirstPartSizes

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
def test_tensor_dict_arrives_unchanged_in_any_order(
    ranks: Ranks, steps: list[Any], size: int, lag: int, inference: bool
) -> None:
    """Empty ones, empty tensors, strided ones, numbers and words, growing and shrinking; of
    engines that call in inference mode, which holds for their thread and not for ours."""
    settings: dict[str, Any] = {"steps": steps, "lag": lag, "inference": inference}
    answers = ranks.run(tensor_dicts.hand_around, size, **settings)
    assert answers == [[]] * size


def test_tensor_dict_steady_step_is_one_message_without_allocation(
    ranks: Ranks,
) -> None:
    sender, receiver = ranks.run(tensor_dicts.steady, 2, steps=20)
    assert sender == {"isend": 20}
    assert receiver == {"irecv": 20}


def test_tensor_dict_replicated_tensors_travel_in_slices(ranks: Ranks) -> None:
    answers = ranks.run(tensor_dicts.sliced, 4, chosen=None)
    assert [answer["error"] for answer in answers[:2]] == ["", ""]
    expected = [
        {"alike": [[n, n + 1], [n + 2, n + 3], [n + 4, n + 5]], "odd": [n, n + 1, n + 2]}
        for n in range(3)
    ]
    assert answers[2:] == [expected] * 2


def test_tensor_dict_unreplicated_tensors_travel_whole(ranks: Ranks) -> None:
    answers = ranks.run(tensor_dicts.sliced, 4, chosen={"own": False})
    assert [step["own"] for step in answers[2]] == [[0, n] for n in range(3)]
    assert [step["own"] for step in answers[3]] == [[1, n] for n in range(3)]


def test_tensor_dict_refuses_slices_of_unreplicated_tensor(ranks: Ranks) -> None:
    """The default of engines is to slice everything that can be divided."""
    assert ranks.run(tensor_dicts.refused, 4) == [["NotReplicated"] * 2] * 2 + [[]] * 2


def test_tensor_dict_names_missing_edge(ranks: Ranks) -> None:
    answers = ranks.run(tensor_dicts.nobody_there, 3)
    assert [answer[2:] for answer in answers] == [[True, False], [False, False], [False, True]]
    for answer in answers:
        assert all("there is no edge" in text for text in answer[:2])


def test_tensor_dict_edge_survives_idle_engine(ranks: Ranks) -> None:
    _, receiver = ranks.run(tensor_dicts.idle, 2, deadline=0.5, seconds=0.8)
    assert receiver == [0, 1, 2]


def test_tensor_dict_unread_step_does_not_block_later_ones(ranks: Ranks) -> None:
    _, receiver = ranks.run(tensor_dicts.unread, 2, steps=12)
    assert receiver == list(range(1, 12, 2))


@given(st.lists(st.integers(0, 10**9), max_size=20), st.integers(1, 4))
def test_first_part_size_is_equal_on_both_ends(sizes: list[int], ahead: int) -> None:
    parts, part_sizes = FirstPartSizes(ahead), []
    for size in sizes:
        part_sizes.append(parts.pop())
        parts.record(size)
    assert part_sizes[:ahead] == [MIN_FIRST_PART_BYTES] * min(ahead, len(sizes))
    assert all(t >= MIN_FIRST_PART_BYTES for t in part_sizes)
    steady, firsts = FirstPartSizes(ahead), []
    for _ in range(ahead + 1):
        firsts.append(steady.pop())
        steady.record(MIN_FIRST_PART_BYTES + 5)
    assert firsts[-1] == MIN_FIRST_PART_BYTES + 5
