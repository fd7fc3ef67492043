"""Frames of the live display."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.report.live.conftest import UNEVEN, ended, live_setup, load

from equipoise.demo.progress import LiveMessage
from equipoise.demo.settings import REFERENCE_NAME, VariantName
from equipoise.report.live.frame import ASCII, UNICODE, Glyphs, render_frame
from equipoise.report.live.state import LiveState
from equipoise.report.live.styled_text import plain, width

STATES = (
    "idle",
    "planning",
    "proposed",
    "transferring",
    "staged",
    "updating",
    "draining",
    "failed",
)
OUTCOMES = ("committed", "unchanged", "stalled")
STEPS = st.integers(0, 100_000)


def messages(ranks: int) -> st.SearchStrategy[LiveMessage]:
    """Whatever a feed may say, in any order."""
    numbers, places = st.integers(0, 50), st.integers(-1, ranks - 1)
    move = st.tuples(st.integers(0, 60), st.integers(0, 500), places, places).map(list)
    moves = st.lists(move, max_size=64)
    rows = st.lists(
        st.lists(st.integers(0, 10**9), min_size=ranks, max_size=ranks), min_size=1, max_size=3
    )
    texts = st.lists(st.text(max_size=70), min_size=2, max_size=2)
    return st.one_of(
        st.fixed_dictionaries(
            {"live": st.just("load"), "step": STEPS, "rank_rows": rows, "text": texts}
        ),
        st.fixed_dictionaries(
            {"live": st.just("step"), "step": STEPS, "seconds": st.floats(0, 1e6)}
        ),
        st.fixed_dictionaries(
            {"live": st.just("state"), "state": st.sampled_from(STATES), "rebalance": numbers}
        ),
        st.fixed_dictionaries(
            {"live": st.just("moves"), "rebalance": numbers, "count": numbers, "moves": moves}
        ),
        st.builds(
            lambda number, step, outcome, copies, named: ended(
                number, step, outcome=outcome, copies=copies, moves=named
            ),
            *(numbers, STEPS, st.sampled_from(OUTCOMES), st.integers(0, 10**6), moves),
        ),
    )


@st.composite
def states(draw: st.DrawFn) -> LiveState:
    ranks = draw(st.integers(1, 64))
    phases = draw(st.lists(st.text(max_size=12), min_size=1, max_size=4))
    steps = draw(st.integers(len(phases), 100_000))
    switches = tuple(
        sorted(draw(st.lists(STEPS, min_size=len(phases) - 1, max_size=len(phases) - 1)))
    )
    state = LiveState(
        live_setup(
            ranks=ranks,
            phases=tuple(phases),
            switch_steps=switches,
            steps=steps,
            stages=draw(st.integers(1, 6)),
            cores=draw(st.integers(0, 8)),
        )
    )
    for name in draw(st.lists(st.sampled_from([*VariantName, REFERENCE_NAME]), max_size=3)):
        state.begin_pass(name)
        for message in draw(st.lists(messages(ranks), max_size=8)):
            state.update(message)
    state.behind, state.missing = draw(st.floats(0, 1e4)), draw(st.integers(0, 10**6))
    state.log_line = draw(st.text(max_size=200))
    return state


@given(
    state=states(),
    columns=st.integers(1, 200),
    rows=st.integers(1, 70),
    glyphs=st.sampled_from([UNICODE, ASCII]),
)
def test_frame_fits_every_terminal(
    state: LiveState, columns: int, rows: int, glyphs: Glyphs
) -> None:
    lines = render_frame(state, columns, rows, glyphs)
    assert 1 <= len(lines) <= rows
    for line in lines:
        assert width(plain(line)) <= columns
        assert plain(line).isprintable()


def frame(state: LiveState, columns: int = 80, rows: int = 24, glyphs: Glyphs = UNICODE) -> str:
    return "\n".join(map(plain, render_frame(state, columns, rows, glyphs)))


def test_frame_says_who_makes_others_wait(moved: LiveState) -> None:
    moved.update(load(8, *UNEVEN))
    text = frame(moved)
    assert "rank 2 computes 1.9x the average of layer 1: all others wait" in text
    assert "waits 47%" in text  # rank 0: 1.00 of 1.90


def test_frame_says_what_moved_and_what_it_brought(moved: LiveState) -> None:
    text = frame(moved)
    assert "rebalance 1 moved 3 experts in 0.8 s while serving: imbalance 0.90 → 0.00" in text
    assert "layer 1 expert 7: rank 2 → rank 3" in text
    assert "all ranks compute the same: nobody waits" in text
    assert "tokens/s  400 in this pass; 200 without balancing" in text
    assert "▲ weights moved" in text


def test_frame_names_moves_while_weights_are_on_their_way(moved: LiveState) -> None:
    moved.update({"live": "state", "state": "planning", "rebalance": 2})
    assert "rebalance 2:  [plan]" in frame(moved)
    moves = [[0, expert, 1, 0] for expert in range(20)]
    moved.update({"live": "moves", "rebalance": 2, "count": 30, "moves": moves})
    text = frame(moved)
    assert "[move 30 experts]" in text
    assert "layer 0 expert 0: rank 1 → rank 0" in text
    assert "and 27 more" in text


def test_frame_names_host_memory_as_source_in_place(moved: LiveState) -> None:
    moved.update(ended(2, 9, copies=1, moves=[[1, 4, -1, 3]]))
    assert "layer 1 expert 4: host → rank 3" in frame(moved)


def test_frame_bars_end_together_at_length_of_step(moved: LiveState) -> None:
    moved.update(load(8, *UNEVEN))
    bars = [line for line in frame(moved).splitlines() if line.startswith(" rank ")][:4]
    ends = [max(bar.rfind(block) for block in "█▏▎▍▌▋▊▉░") for bar in bars]
    assert max(ends) - min(ends) <= 1
    work = [bar.count("█") for bar in bars]
    assert work[2] > work[0] > work[1] > work[3]
    # Twice the rows are twice the length, to within the cells that are filled in part.
    assert work[2] * 100 == pytest.approx(work[0] * 190, abs=200)


def test_frame_shows_switch_of_text(moved: LiveState) -> None:
    moved.update(load(40, *UNEVEN, text=("中文", "字\x1b[2J\n")))
    text = frame(moved)
    assert "chinese  the text switched at step 40: other experts are busy" in text
    assert "中文字·[2J" in text
    assert "\x1b" not in text


def test_frame_names_text_of_the_newest_step_as_the_request_is_of_it(moved: LiveState) -> None:
    moved.update(load(39, *UNEVEN))
    assert " text       python" in frame(moved)
    moved.update({"live": "step", "step": 40, "seconds": 0.1})
    assert " text       chinese" in frame(moved)


def test_frame_of_reference_pass_compares_passes(moved: LiveState) -> None:
    moved.begin_pass(REFERENCE_NAME)
    moved.count_steps(30)
    text = frame(moved)
    assert "outputs must be identical" in text
    assert "step 30/120" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["unbalanced"].count("█") > lines["local"].count("█") > 0
    assert "weights moved 1 time" in lines["local"]


def test_frame_without_unicode_is_ascii(moved: LiveState) -> None:
    moved.update(load(8, *UNEVEN))
    text = frame(moved, glyphs=ASCII)
    assert text.isascii()
    assert "0.90 -> 0.00" in text
    assert "####" in text


def test_frame_leaves_bars_and_pass_to_last(moved: LiveState) -> None:
    texts = [frame(moved, rows=rows) for rows in range(1, 30)]
    for short, tall in pairwise(texts):
        assert len(short.splitlines()) <= len(tall.splitlines())
    assert "rank 2 " in frame(moved, rows=12)
    assert "pass 2/2" in frame(moved, rows=12)


def test_frame_of_many_ranks_shows_the_fullest(moved: LiveState) -> None:
    state = LiveState(live_setup(ranks=64))
    state.begin_pass("local")
    state.update(load(4, [10 + 100 * (rank == 41) for rank in range(64)]))
    text = frame(state)
    assert " rank 41 " in text
    assert "and 57 ranks with less" in text


def test_frame_says_that_it_is_paced_and_what_is_missing(moved: LiveState) -> None:
    assert "paced" not in frame(moved)
    moved.behind, moved.missing = 4.2, 7
    text = frame(moved, columns=100)
    assert "paced for the eye: 4 s behind the serving, which does not wait" in text
    assert "7 events not shown" in text
    moved.log_line = "W: something\x07 happened"
    assert "W: something· happened" in frame(moved)


def test_frame_without_load_waits_for_ranks() -> None:
    state = LiveState(live_setup())
    assert "ranks start" in frame(state)
    state.begin_pass("unbalanced")
    assert "no step is sampled yet" in frame(state)
