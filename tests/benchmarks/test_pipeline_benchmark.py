"""What the stages' benchmark serves, how it looks at what arrives, and what it makes of it."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    emulation, figures, page, requests, stamps, work, crew, handover, benchmark = (
        importlib.import_module(name)
        for name in (
            "pipeline_emulation",
            "pipeline_figures",
            "pipeline_page",
            "pipeline_requests",
            "stamps",
            "pipeline_work",
            "pipeline_crew",
            "handover",
            "pipeline",
        )
    )
finally:
    sys.path.remove(str(BENCHMARKS))
Told = dict[str, Any]
POINT = emulation.Point(hidden=64, tokens=4, ratio=0.5)
SMALL = requests.Serving(hidden=64, prompt=4, decode=3, concurrency=5, requests=9, ratio=0.5)
servings = st.builds(
    requests.Serving,
    hidden=st.just(64),
    prompt=st.integers(1, 9),
    decode=st.integers(2, 9),
    concurrency=st.integers(1, 9),
    requests=st.integers(1, 20),
    ratio=st.just(0.5),
)
marks = st.tuples(st.integers(0, 999), st.integers(0, 7), st.integers(0, 7))


class TestStamps:
    @given(rows=st.integers(1, 20), mark=marks)
    def test_what_was_stamped_is_right(self, rows: int, mark: tuple[int, int, int]) -> None:
        tensor = torch.zeros(rows, 8, dtype=torch.bfloat16)
        stamps.stamp(tensor, *mark)
        assert stamps.wrong(tensor, *mark) == 0

    @given(rows=st.integers(1, 20), mark=marks, other=marks)
    def test_another_step_or_stage_or_tensor_is_wrong(
        self, rows: int, mark: tuple[int, int, int], other: tuple[int, int, int]
    ) -> None:
        tensor = torch.zeros(rows, 8, dtype=torch.bfloat16)
        stamps.stamp(tensor, *mark)
        assert (stamps.wrong(tensor, *other) == 0) == (mark == other)

    @given(part=st.integers(1, 31), dtype=st.sampled_from([torch.bfloat16, torch.int64]))
    def test_a_part_that_was_written_again_is_found(self, part: int, dtype: torch.dtype) -> None:
        tensor, later = torch.zeros(32, 64, dtype=dtype), torch.zeros(32, 64, dtype=dtype)
        stamps.stamp(tensor, 3, 0, 0)
        stamps.stamp(later, 4, 0, 0)
        tensor[:part] = later[:part]
        assert 0 < stamps.wrong(tensor, 3, 0, 0) < stamps.SAMPLES

    @given(rows=st.integers(1, 7))
    def test_a_view_of_the_first_rows_has_stamps_of_its_own(self, rows: int) -> None:
        whole = handover.Activations.empty(8, 64)
        stamps.stamp(whole.first(rows).hidden, 1, 0, 0)
        assert stamps.wrong(whole.first(rows).hidden.clone(), 1, 0, 0) == 0


class TestWork:
    @pytest.mark.parametrize("work_of_it", [work.Steady(POINT), SMALL], ids=["steady", "serving"])
    def test_work_is_the_same_behind_json(self, work_of_it: Any) -> None:
        again = work.work_of(json.loads(json.dumps(work_of_it.fields())))
        seconds = {emulation.message_bytes(64, 4): 0.1}
        assert again.batches(seconds, 6) == work_of_it.batches(seconds, 6)
        assert again.name == work_of_it.name

    @given(transfer=st.floats(1e-6, 1.0), ratio=st.sampled_from(emulation.RATIOS))
    def test_a_transfer_takes_the_part_of_compute_unless_that_is_shortest(
        self, transfer: float, ratio: float
    ) -> None:
        compute = replace(POINT, ratio=ratio).compute(transfer)
        assert compute >= emulation.FLOOR
        assert compute == emulation.FLOOR or transfer / compute == pytest.approx(ratio)

    def test_steady_micro_batches_are_all_alike_and_enough(self) -> None:
        found = work.Steady(POINT).batches({emulation.message_bytes(64, 4): 0.1}, 6)
        assert {(batch.rows, batch.seconds) for batch in found} == {(4, 0.2)}
        assert [batch.step for batch in found] == list(range(len(found)))
        assert len(found) == emulation.WARM + 6 + emulation.FEWEST

    def test_points_are_all_that_is_asked_for(self) -> None:
        found = {(point.hidden, point.tokens, point.ratio) for point in emulation.points()}
        assert len(found) == len(emulation.points()) == 45
        assert {4096, 5120, 7168} == {hidden for hidden, _, _ in found}
        assert {1, 8, 64, 256, 512} == {tokens for _, tokens, _ in found}
        assert {0.5, 0.75, 1.0} == {ratio for _, _, ratio in found}


class TestRequests:
    @given(serving=servings, in_flight=st.integers(1, 6))
    def test_every_request_gets_its_tokens_one_round_after_the_other(
        self, serving: Any, in_flight: int
    ) -> None:
        rows, done = serving.plan(in_flight)
        assert len(done) == serving.requests
        for request in done:
            assert request.complete
            assert set(np.diff(request.passes)) <= {in_flight}
            assert request.behind is None or request.passes[0] == request.behind + in_flight
        assert max(request.passes[-1] for request in done) == len(rows) - 1

    @given(serving=servings, in_flight=st.integers(1, 6))
    def test_rows_are_prompts_and_tokens(self, serving: Any, in_flight: int) -> None:
        rows, done = serving.plan(in_flight)
        wanted = np.zeros(len(rows), dtype=int)
        for request in done:
            wanted[request.passes[0]] += serving.prompt
            wanted[request.passes[1:]] += 1
        assert rows == np.maximum(wanted, 1).tolist()

    @given(serving=servings, in_flight=st.integers(1, 6))
    def test_no_more_clients_are_served_at_once_than_there_are(
        self, serving: Any, in_flight: int
    ) -> None:
        _, done = serving.plan(in_flight)
        spans = [(r.passes[0], r.passes[-1]) for r in done]
        for step in {first for first, _ in spans}:
            assert sum(first <= step <= last for first, last in spans) <= serving.concurrency
        assert sum(r.behind is None for r in done) <= serving.concurrency

    def test_compute_is_in_proportion_to_rows_above_the_floor(self) -> None:
        seconds = {emulation.message_bytes(64, 4): 0.02}
        rows, _ = SMALL.plan(6)
        for batch, n in zip(SMALL.batches(seconds, 6), rows, strict=True):
            assert batch.seconds == pytest.approx(max(emulation.FLOOR, 0.01 * n))

    def test_latencies_are_those_of_the_formulas(self) -> None:
        first = requests.Request(3, None, [0, 2, 4])
        second = requests.Request(1, 4, [6])
        sampled = [1.0, 0.0, 1.5, 0.0, 2.5, 0.0, 4.0]
        found = requests.latencies([first, second], 0.25, sampled)
        assert found.e2e.tolist() == [2.25, 1.5]
        assert found.ttft.tolist() == [0.75, 1.5]
        assert found.tpot.tolist() == [0.75]
        assert found.itl.tolist() == [0.5, 1.0]


def told(system: str, rate: float, wrong: int = 0) -> list[Told]:
    """What two stages write of a run whose last one is through so many times a second."""
    ended = (100.0 + np.arange(40) / rate).tolist()
    stage = {
        "began": [99.0],
        "ended": ended,
        "wrong": 0,
        "cpu": 0.4,
        "compute": 0.01,
        "messages": 2,
    }
    return [stage, {**stage, "wrong": wrong}]


def link_of(rates: dict[str, list[float]], **changes: int) -> Told:
    """Figures of a link on which systems had these rates, by round."""
    point = work.Steady(POINT)
    nbytes = emulation.message_bytes(64, 4)
    link = {"latency": 1e-4, "rate": nbytes / 4e-3, "seconds": [[nbytes, 5e-3]]}
    runs = [crew.Run(point, name, turn) for name in rates for turn in range(len(rates[name]))]
    written = [told(run.system, rates[run.system][run.round], **changes) for run in runs]
    found: Told = figures.link_figures(runs, crew.Told(link, written), 2)
    return {"name": "a link", "stages": 2, "asked": None, "measured": link, **found}


RATES = {"blocking": [50.0, 60.0, 40.0], "coordinator": [75.0, 60.0, 80.0]}


class TestParts:
    def test_all_take_turns_in_every_round(self) -> None:
        part = benchmark.Part("loopback", 2, (work.Steady(POINT), SMALL), 5)
        runs = part.runs()
        for one in part.works:
            for turn in range(5):
                names = [run.system for run in runs if (run.work, run.round) == (one, turn)]
                there = {benchmark.WORD} if turn < benchmark.FEWER else set()
                assert set(names) == {*figures.CONTESTANTS} - {benchmark.WORD} | there
                assert len(names) == len(set(names))
        assert {benchmark.turns(turn)[0] for turn in range(6)} >= set(figures.BASELINES)
        assert [run.work for run in runs] == sorted((r.work for r in runs), key=part.works.index)

    def test_the_whole_has_every_point_on_every_link_and_four_stages(self) -> None:
        parts = benchmark.whole(("loopback", "emulated"), emulation.HIDDEN, emulation.TOKENS)
        found = [(part.link, part.stages, len(part.works)) for part in parts]
        assert found[:2] == [("loopback", 2, 46), ("emulated", 2, 46)]
        assert found[2:] == [("loopback", 4, 1), ("emulated", 4, 1)]
        assert {part.rounds for part in parts} == {benchmark.ROUNDS}

    def test_what_is_selected_is_all_that_is_swept(self) -> None:
        part = benchmark.whole(("loopback",), (4096,), (1, 8))[0]
        swept = {one.point for one in part.works if isinstance(one, work.Steady)}
        assert {(point.hidden, point.tokens) for point in swept} == {(4096, 1), (4096, 8)}


class TestFigures:
    def test_a_rate_is_beside_that_of_a_pipeline_without_transfers(self) -> None:
        found = link_of(RATES)["points"][0]
        assert found["systems"]["blocking"]["rate"]["median"] == pytest.approx(50.0)
        assert found["systems"]["blocking"]["of_bound"]["median"] == pytest.approx(0.5)
        assert found["systems"]["blocking"]["cpu"]["median"] == pytest.approx(0.02)

    def test_ratios_are_those_of_the_same_round(self) -> None:
        over = link_of(RATES)["points"][0]["over"]
        spread = over["coordinator"]["blocking"]
        assert spread["median"] == pytest.approx(1.5)
        assert spread["lowest"] == pytest.approx(1.0)
        assert spread["highest"] == pytest.approx(2.0)

    def test_a_wrong_word_leaves_no_figures(self) -> None:
        with pytest.raises(RuntimeError, match="blocking, round 0: 3 wrong words"):
            link_of(RATES, wrong=3)

    def test_a_transfer_is_bound_by_bytes_where_they_take_half_of_it(self) -> None:
        assert link_of(RATES)["points"][0]["bandwidth_bound"]

    def test_latencies_have_the_columns_of_a_server_s_table(self) -> None:
        values = np.arange(1.0, 102.0)
        found = figures.table([requests.Latencies(values, values, values, values)])
        assert list(found) == ["e2e", "ttft", "tpot", "itl"]
        assert found["ttft"] == {
            "average": 51.0,
            "min": 1.0,
            "max": 101.0,
            "median": 51.0,
            "P75": 76.0,
            "P90": 91.0,
            "P99": 100.0,
        }

    def test_rounds_of_requests_are_taken_together(self) -> None:
        rows, done = SMALL.plan(emulation.in_flight(2))
        ended = (100.0 + np.arange(len(rows))).tolist()
        stage = {"began": [99.0], "ended": ended, "wrong": 0, "cpu": 0.0, "compute": 0.01}
        runs = [crew.Run(SMALL, "blocking", turn) for turn in range(2)]
        both = crew.Told({}, [[stage, stage]] * 2)
        found = figures.link_figures(runs, both, 2)["serving"][0]["systems"]["blocking"]
        assert found["duration"]["median"] == len(rows)
        assert found["requests_per_second"]["median"] == pytest.approx(len(done) / len(rows))
        assert found["latencies"]["itl"]["max"] == emulation.in_flight(2)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the channel were among those who are compared."""
    named = {**figures.CONTESTANTS, page.OURS: figures.CONTESTANTS["blocking"]}
    monkeypatch.setattr(figures, "CONTESTANTS", named)


class TestPage:
    def text(self, rates: dict[str, list[float]]) -> str:
        return "\n".join(page.text({"links": [link_of(rates)]}))

    def test_without_ours_nothing_is_judged(self) -> None:
        text = self.text(RATES)
        assert "| coordinator over blocking |" in text
        assert "1.50 (1.00 to 2.00)" in text
        assert "Bars" not in text

    @pytest.mark.usefixtures("ours")
    def test_bars_that_hold_are_met(self) -> None:
        text = self.text({**RATES, "channel": [97.0, 97.0, 97.0]})
        assert "Met at all 1 points." in text
        assert "| yes |" in text

    @pytest.mark.usefixtures("ours")
    @pytest.mark.parametrize(
        ("rates", "name"),
        [
            ({"channel": [94.0] * 3}, "compute-bound rate"),
            ({"channel": [97.0] * 3, "blocking": [75.0] * 3}, "over blocking"),
            ({"channel": [97.0] * 3, "coordinator": [97.0] * 3}, "over coordinator"),
            ({"channel": [float("nan")] * 3}, "compute-bound rate"),
        ],
    )
    def test_a_bar_that_is_missed_is_named(self, rates: dict[str, list[float]], name: str) -> None:
        text = self.text({**RATES, **rates})
        assert f"| **no**: {name}" in text
        assert "**Missed at 1 of 1 points.**" in text

    @pytest.mark.usefixtures("ours")
    def test_four_stages_are_reported_and_not_judged(self) -> None:
        link = {**link_of({**RATES, "channel": [94.0] * 3}), "stages": 4}
        text = "\n".join(page.text({"links": [link]}))
        assert "| channel over blocking | channel over coordinator |\n" in text
        assert "Bars" not in text

    @pytest.mark.usefixtures("ours")
    def test_the_rate_is_judged_where_a_transfer_takes_half_of_compute(self) -> None:
        point = link_of({**RATES, "channel": [94.0] * 3})["points"][0]
        assert page.missed(point) == ["compute-bound rate"]
        assert page.missed({**point, "transfer": 0.4 * point["compute"]}) == []
        bound = {**point, "bandwidth_bound": True}
        point["over"]["channel"]["blocking"]["median"] = 1.2
        point["systems"]["channel"]["of_bound"]["median"] = 0.97
        assert page.missed(bound) == ["over blocking"]
        assert page.missed({**bound, "transfer": 0.4 * point["compute"]}) == []
        point["over"]["channel"]["blocking"]["median"] = float("nan")
        assert page.missed({**point, "transfer": 0.0}) == ["over blocking"]

    def test_a_link_is_told_beside_what_was_asked_for(self) -> None:
        link = {"measured": {"latency": 1e-3, "rate": 5e8}, "asked": None}
        assert "1.000 ms one way for 8 bytes, 500 MB/s" in page.link_told(link)
        asked = {**link, "asked": {"latency": 2e-3, "rate": 4e8}}
        assert page.link_told(asked).endswith("asked for: 2 ms, 400 MB/s.")

    def test_the_table_of_requests_has_every_kind_of_latency(self) -> None:
        rows, _ = SMALL.plan(emulation.in_flight(2))
        ended = (100.0 + np.arange(len(rows))).tolist()
        stage = {"began": [99.0], "ended": ended, "wrong": 0, "cpu": 0.0, "compute": 0.01}
        runs = [crew.Run(SMALL, "blocking", 0)]
        found = figures.link_figures(runs, crew.Told({}, [[stage, stage]]), 2)
        text = "\n".join(page._scenario(found["serving"][0]))
        assert all(f"| {words} | blocking |" in text for words in page.KINDS.values())
        assert "| average | min | max | median | P75 | P90 | P99 |" in text


def test_modules_are_those_of_this_folder() -> None:
    modules: list[ModuleType] = [emulation, figures, page, requests, stamps, work, crew, handover]
    assert {Path(module.__file__ or "").parent for module in modules} == {BENCHMARKS}
