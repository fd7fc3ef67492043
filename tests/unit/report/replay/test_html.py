"""The page of a replay: whole, escaped, and with the pictures that there are figures for."""

import re
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
from helpers.harnesses.html_pages import assert_every_text_is_escaped
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.formats.routing_trace import CountsTrace
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Expert, find_hardware
from equipoise.report.advice.kv_cache import KvCache
from equipoise.report.replay.decision import decide
from equipoise.report.replay.html import render_html
from equipoise.report.replay.inputs import ReplayInputs
from equipoise.report.replay.plots import MAX_LINES, MAX_POINTS, compared, pictures, smoothed
from equipoise.report.replay.replay import Outcome, Refusal, Replay
from equipoise.report.replay.replay import replay as play
from equipoise.report.replay.steps import CountedSteps

pytest.importorskip("matplotlib")

RANKS, LAYERS, EXPERTS, STEPS = 4, 2, 8, 60
EXPERT_BYTES = 1 << 20
BLOCK = 7
PICTURES = {
    "Imbalance, step by step",
    "Rows by layer and destination rank",
    "Rows by layer and expert",
    "Throughput by slots",
    "What moves, and what it costs",
}
Counts = npt.NDArray[np.int32]


def source(counts: Counts) -> CountedSteps:
    def blocks(most: int) -> Iterator[Counts]:
        yield from np.array_split(counts, -(-len(counts) // min(most, BLOCK)))

    steps, layers, experts = counts.shape
    return CountedSteps(CountsTrace(tuple(range(layers)), experts, None, steps, "made", blocks))


def replayed(counts: Counts, **more: object) -> Replay:
    known: dict[str, object] = {"slots": (12,), "engines": ("equipoise",), "window": 4}
    known |= {"interval": 8, "source": source(counts), "ranks": RANKS} | more
    return play(ReplayInputs(**known))  # type: ignore[arg-type]


def uneven(steps: int = STEPS) -> Counts:
    """Expert k gets rows in proportion to k: the last rank has most."""
    counts = np.random.default_rng(3).poisson(5 * np.arange(EXPERTS), (steps, LAYERS, EXPERTS))
    return counts.astype(np.int32)


@pytest.fixture(scope="module")
def gained() -> Replay:
    return replayed(uneven())


def with_outcomes(result: Replay, **values: object) -> Replay:
    """The same replay, with some figures of all candidates changed."""
    changed = (replace(one, **values) for one in result.outcomes)  # type: ignore[arg-type]
    return replace(result, outcomes=tuple(changed))


def page(result: Replay) -> str:
    return render_html(result, {"command": "equipoise replay <t>", "trace": "<t>"})


def titles(result: Replay) -> set[str]:
    return {picture.title for picture in pictures(result, decide(result))}


def test_replay_page_has_its_parts_in_order(gained: Replay) -> None:
    text = page(gained)
    heads = ["What balancing would gain", 'class="verdict good"', 'class="tiles"', "<table>"]
    heads += ["What to do with each engine", "Imbalance, step by step"]
    heads += ["Rows by layer and destination rank", "Rows by layer and expert"]
    heads += ["Throughput by slots", "What moves, and what it costs", "What it rests on"]
    heads += ["<h2>Where from</h2>"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    assert text.count("<svg") == len(PICTURES)
    assert text.count("<tr") == 1 + len(gained.outcomes)


def test_replay_page_is_self_contained_and_reproducible(
    gained: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    text = page(gained)
    assert text == page(gained)
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    assert "<script" not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_replay_page_escapes_names_of_files_and_candidates(gained: Replay) -> None:
    refusal = Refusal("<i>&", 16, "<no> room")
    text = page(replace(with_outcomes(gained, name="<u>$x$" * 9), refusals=(refusal,)))
    for raw, escaped in (("<u>", "&lt;u&gt;"), ("<t>", "&lt;t&gt;"), ("<no>", "&lt;no&gt; room")):
        assert raw not in text
        assert escaped in text


def test_replay_page_escapes_every_text(gained: Replay) -> None:
    refused = replace(gained, refusals=(Refusal("name", 16, "no room"),))
    assert_every_text_is_escaped("equipoise.report.replay.html", lambda: page(refused))


def test_replay_page_of_even_load_says_leave_it_off() -> None:
    text = page(replayed(np.full((20, LAYERS, EXPERTS), 6, np.int32)))
    assert "Leave it off" in text
    assert 'class="verdict"' in text
    assert '<tr class="main"' not in text


def test_replay_draws_no_picture_without_figures(gained: Replay) -> None:
    assert titles(gained) == PICTURES
    unmoved = with_outcomes(gained, rebalances=())
    assert PICTURES - titles(unmoved) == {"What moves, and what it costs"}
    single = replace(gained, outcomes=gained.outcomes[:2])
    assert PICTURES - titles(single) == {"Throughput by slots"}
    alone = replace(gained, outcomes=gained.outcomes[:1])
    assert titles(alone) == {
        "Imbalance, step by step",
        "Rows by layer and destination rank",
        "Rows by layer and expert",
    }
    assert "tiles" not in page(alone).split("</style>")[1]


def test_replay_page_marks_dead_zone_only_where_it_prices() -> None:
    zone = DeadZone(1.25, 0.5, "measured")
    assert "dead zone, up to 0.250" in page(replayed(uneven(), dead_zone=zone))
    roofline = replayed(
        uneven(), hardware=find_hardware("h200"), expert=Expert(EXPERT_BYTES, "fp8")
    )
    assert "dead zone" not in page(roofline)


def test_replay_page_shows_what_slots_take_from_kv_cache() -> None:
    weights = 2 * LAYERS * EXPERT_BYTES
    cache = KvCache(1 << 10, weights + (3 << 20))
    known = replayed(uneven(), expert=Expert(EXPERT_BYTES, "fp8"), kv_cache=cache)
    text = page(known)
    assert "3,072" in text
    assert "tokens of KV cache on a rank" in text
    assert "has room for" in text
    assert "has room for" not in page(replayed(uneven()))


def test_replay_page_shows_pauses_only_where_there_are(gained: Replay) -> None:
    assert "serving paused" not in page(gained)
    moved = gained.outcomes[1].rebalances
    paused = with_outcomes(gained, rebalances=tuple(replace(m, pause=0.25) for m in moved))
    assert "serving paused" in page(paused)


def test_compared_candidates_are_best_of_each_engine(gained: Replay) -> None:
    others = tuple(
        replace(gained.outcomes[1], name=f"{engine} {rule}", engine=engine, batch=batch)
        for engine in ("vllm", "sglang", "trtllm", "a", "b")
        for rule, batch in (("bad", 0.5), ("good", 0.9))
    )
    many = replace(gained, outcomes=(gained.now, *others, *gained.outcomes[1:]))
    shown = compared(many, decide(many))
    assert len(shown) == MAX_LINES
    assert [one.name for one in shown[1:]] == [
        f"{engine} good" for engine in ("vllm", "sglang", "trtllm", "a", "b")
    ]


def test_compared_candidates_have_ours_with_and_without_slots(gained: Replay) -> None:
    shown = compared(gained, decide(gained))
    assert [one.slots for one in shown] in ([8, 12, 8], [8, 8, 12])


def test_replay_table_folds_many_candidates_in(gained: Replay) -> None:
    first = gained.outcomes[1]
    many: tuple[Outcome, ...] = tuple(replace(first, name=f"rule {k}") for k in range(20))
    text = page(replace(gained, outcomes=(gained.now, *many)))
    assert "All, 21 rows" in text
    assert text.count("<td>rule 19</td>") == 1


def test_replay_sums_rows_of_experts() -> None:
    counts = uneven()
    assert replayed(counts).expert_rows.tolist() == counts.sum(axis=0).tolist()


@settings(max_examples=40)
@given(
    steps=st.lists(st.integers(0, 100_000), min_size=1, max_size=60, unique=True).map(sorted),
    width=st.integers(1, 500),
    data=st.data(),
)
def test_smoothed_line_keeps_the_sum_of_known_figures(
    steps: list[int], width: int, data: st.DataObject
) -> None:
    figures = st.floats(0, 8, width=32) | st.just(float("nan"))
    values = np.array(data.draw(st.lists(figures, min_size=len(steps), max_size=len(steps))))
    across, up = smoothed(np.array(steps), values, width)
    known = ~np.isnan(values)
    counts = np.bincount(np.array(steps)[known] // width)
    assert (np.diff(across) >= width).all()
    assert np.isclose((up * counts[counts > 0]).sum(), np.nansum(values))


def test_long_trace_becomes_few_points() -> None:
    steps = np.arange(100_000)
    width = -(-len(steps) // MAX_POINTS)
    across, up = smoothed(steps, np.sin(steps / 9_000), width)
    assert len(across) <= MAX_POINTS
    assert np.allclose(up, np.sin(across / 9_000), atol=1e-3)
