"""What the benchmark of the engine gives to every system, and what it makes of what they do."""

import importlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.logical_maps import logical_maps
from equipoise.balancer.experts.placement import check
from equipoise.hal.communicator import Exchange, Parcel

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    emulation, device, link, board, traffic, figures, page, straightforward = (
        importlib.import_module(name)
        for name in (
            "emulation",
            "emulated_device",
            "emulated_link",
            "engine_board",
            "engine_traffic",
            "engine_figures",
            "engine_page",
            "straightforward",
        )
    )
finally:
    sys.path.remove(str(BENCHMARKS))
Told = dict[str, Any]
SMALL = traffic.Traffic(skew=1.0, stages=1)
SYSTEMS = ("none", "none again", "perfect", "stop-the-world", "boundary", "locked")


class TestTraffic:
    @given(step=st.integers(0, SMALL.steps - 1), rank=st.integers(0, emulation.RANKS - 1))
    def test_tokens_are_a_function_of_step_and_rank(self, step: int, rank: int) -> None:
        other = traffic.Traffic(skew=1.0, stages=1)
        ids = SMALL.ids(step, rank)
        assert np.array_equal(ids, other.ids(step, rank))
        assert ids.shape[0] == emulation.LAYERS
        assert 0 <= ids.min() <= ids.max() < emulation.EXPERTS

    def test_ranks_and_steps_have_tokens_of_their_own(self) -> None:
        digests = {traffic.digest([SMALL.ids(s, r)]) for s in range(3) for r in range(3)}
        assert len(digests) == 9

    def test_a_stage_begins_with_the_first_step_that_its_first_plan_knows(self) -> None:
        plans = list(traffic.given(SMALL, traffic.common))
        for stage, switch in enumerate(SMALL.switches):
            assert SMALL.stage(switch - 1) == stage - 1
            first = next(plan for plan in plans if plan.stage == stage)
            assert switch == first.due - 1 - emulation.WINDOW

    @pytest.mark.parametrize("point", emulation.points(), ids=lambda point: point.name)
    def test_plans_are_placements_within_their_budget(self, point: Any) -> None:
        found = traffic.traffic_of(point)
        plans = list(traffic.given(found, traffic.common))
        assert len(plans) == emulation.EPOCHS * point.stages
        before = traffic.start()
        for plan in plans:
            check(plan.layout.placement, traffic.SHAPE)
            # Behind a switch new shares may be enough; what is made anew moves weights.
            assert plan.anew <= plan.moves <= (emulation.ANEW if plan.anew else emulation.FOLLOWING)
            assert (plan.layout.placement != before.placement).sum() >= plan.moves
            assert plan.layout.digest != before.digest
            before = plan.layout
            assert plan.due < found.steps

    def test_plans_are_the_same_when_they_are_made_again(self) -> None:
        once, again = (
            [plan.layout.digest for plan in traffic.given(SMALL, traffic.common)] for _ in range(2)
        )
        assert once == again
        assert len(set(once)) == len(once)


class TestEmulation:
    def test_a_stream_is_busy_from_when_it_is_free_and_has_been_asked(self) -> None:
        clock = device.Clock()
        clock.spend(2.0)  # long ago: nobody waits
        clock.not_before(1.0)
        assert clock.free == 2.0
        clock.not_before(5.0)
        clock.spend(0.5)
        assert clock.free == 5.5

    @given(sizes=st.lists(st.floats(0.0, 10.0), min_size=1), begins=st.floats(0.0, 100.0))
    def test_a_link_is_serial_in_each_direction(self, sizes: list[float], begins: float) -> None:
        port = link.Port()
        ends = [port.take(begins, size) for size in sizes]
        assert ends[-1] == pytest.approx(begins + sum(sizes))

    def test_what_is_sent_and_what_is_received_pass_each_other(self) -> None:
        wire = link.Link(emulation.Point(link=emulation.SLOT_BYTES, latency=0.5), slot=16)
        two, three = (torch.zeros(16 * n, dtype=torch.uint8) for n in (2, 3))
        both = Exchange(sends=(Parcel(1, two),), receives=(Parcel(1, three),))
        before = device.now()
        first, second = wire.book(both), wire.book(both)
        assert first >= before + 3.0 + 0.5
        assert second == pytest.approx(first + 3.0)

    def test_without_emulation_nothing_is_waited_for(self) -> None:
        free = emulation.raw(emulation.CENTRE)
        wire = link.Link(free, slot=16)
        blob = torch.zeros(1 << 20, dtype=torch.uint8)
        assert wire.book(Exchange(sends=(Parcel(1, blob),), receives=())) <= device.now()
        assert free.row == free.fixed == free.latency == 0.0

    def test_a_slower_device_takes_so_many_times_longer_for_everything(self) -> None:
        centre, slow = emulation.CENTRE, emulation.CENTRE.slower(3.0)
        assert (slow.row, slow.fixed) == (3.0 * centre.row, 3.0 * centre.fixed)
        assert {centre.link / slow.link, centre.host / slow.host, centre.hbm / slow.hbm} == {3.0}
        free = emulation.raw(centre)
        assert free.slower(3.0) == free

    def test_points_differ_from_the_centre_in_what_they_are_named_for(self) -> None:
        around = emulation.points()[1:]
        assert {p.row / emulation.CENTRE.row for p in around} == {0.5, 1.0, 2.0}
        assert {p.link / emulation.CENTRE.link for p in around} == {0.5, 1.0, 2.0}
        assert len({p.skew for p in around}) == 3


class TestBoard:
    def make(self, folder: Path, ranks: int, deadline: float) -> list[Any]:
        path = folder / "board"
        path.write_bytes(bytes(board.Board.size(ranks)))
        return [board.Board(path, rank, ranks, deadline) for rank in range(ranks)]

    def test_ranks_begin_together_and_know_what_each_computes(self, tmp_path: Path) -> None:
        boards, met = self.make(tmp_path, 3, 20.0), {}

        def serve(rank: int) -> None:
            for turn in range(10):
                rows = np.arange(3) + 10 * rank + turn
                met[rank, turn] = boards[rank].meet(float(rank + turn), rows, turn)

        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        for (_, turn), meeting in met.items():
            assert meeting.start == 2.0 + turn
            assert meeting.rows.tolist() == [30 + 3 * turn + 3 * i for i in range(3)]
            assert meeting.generations.tolist() == [turn] * 3
        assert len(met) == 30

    def test_who_waits_for_nobody_gives_up(self, tmp_path: Path) -> None:
        alone = self.make(tmp_path, 2, 0.05)[0]
        with pytest.raises(TimeoutError, match=r"True, False"):
            alone.meet(0.0, np.zeros(2, dtype=np.int64), 0)


@given(
    placement=st.integers(1, 9).flatmap(
        lambda experts: st.tuples(
            st.just(experts), st.lists(st.integers(0, experts - 1), min_size=1, max_size=30)
        )
    )
)
def test_the_straightforward_maps_are_right(placement: tuple[int, list[int]]) -> None:
    experts, slots = placement
    maps = straightforward.InUse.empty(experts)
    straightforward.install(torch.tensor(slots), maps)
    wanted = logical_maps(np.array([slots]), experts, straightforward.WIDTH)
    assert np.array_equal(maps.slots.numpy(), wanted.slots[0])
    assert np.array_equal(maps.counts.numpy(), wanted.counts[0])


def told(system: str, turn: int = 0, beside: float = 0.001, **slow: float) -> list[Told]:
    """What two ranks write of a run: steps of 10 ms of device time and `beside`; some slower."""
    steps = SMALL.steps
    seconds = np.full(steps, 0.010 + beside)
    for step, more in slow.items():
        seconds[int(step[4:])] += more
    ended = 100.0 + np.cumsum(seconds)
    plans = [plan.layout.digest for plan in traffic.given(SMALL, traffic.common)]
    due = [plan.due for plan in traffic.given(SMALL, traffic.common)]
    moves = system not in ("none", "none again")
    rank = {
        "system": system,
        "round": turn,
        "began": (ended - seconds).tolist(),
        "ended": ended.tolist(),
        "ideal": [0.010] * steps,
        "wrong": 0,
        "cpu": 0.1,
        "freed": [],
        "layouts": ["start", *(plans if moves else [])],
        "plans": plans,
        "rebalances": [[step, step + 2, 7] for step in due] if moves else [],
    }
    return [{**rank, "tokens": "a"}, {**rank, "tokens": "b"}]


def slow_steps(seconds: float) -> dict[str, float]:
    """That much in the first step of each rebalance."""
    return {f"step{plan.due}": seconds for plan in traffic.given(SMALL, traffic.common)}


def measured(change: Callable[[list[list[Told]]], None] = lambda runs: None) -> Told:
    """Figures of two rounds in which ours is 1 ms slower in a rebalance, and others 100 ms."""
    runs = [
        run
        for turn in (0, 1)
        for run in (
            told("none", turn, beside=0.004),
            told("none again", turn, beside=0.004),
            told("perfect", turn),
            told("stop-the-world", turn, beside=0.004, **slow_steps(0.100)),
            told("boundary", turn, beside=0.002, **slow_steps(0.003)),
            told("locked", turn, beside=0.001),
        )
    ]
    change(runs)
    found: Told = figures.point_figures(emulation.Point(skew=1.0, stages=1), runs)
    return found


class TestFigures:
    def test_every_system_has_its_row_and_ours_its_bars(self) -> None:
        found = measured()
        assert tuple(found["systems"]) == SYSTEMS
        assert set(found["bars"]) == {"boundary", "locked"}
        json.dumps(found)

    def test_a_stall_is_what_a_step_takes_beyond_the_median_without_balancing(self) -> None:
        rows = measured()["systems"]
        assert rows["stop-the-world"]["stall"]["mean"] == pytest.approx(100.0)
        assert rows["stop-the-world"]["total_stall"]["median"] == pytest.approx(300.0)
        assert rows["boundary"]["total_stall"]["median"] == pytest.approx(3.0)
        assert rows["none again"]["total_stall"]["median"] == pytest.approx(0.0, abs=1e-6)

    def test_the_three_bars_are_ratios_of_a_round(self) -> None:
        bars = measured()["bars"]["boundary"]
        assert bars["stall"]["median"] == pytest.approx(100.0)
        slowest = np.percentile([0.015] * 2 + [0.012] * 4, 99)  # two balanced epochs of 3 steps
        assert bars["p99"]["median"] == pytest.approx(slowest / 0.011)
        steps = emulation.INTERVAL * emulation.EPOCHS + emulation.WINDOW
        none, perfect, ours = (1 / (steps * s) for s in (0.014, 0.011, 0.012))
        ours = 1 / (steps * 0.012 + 3 * 0.003)
        gain = (ours - none) / (perfect - none)
        assert bars["throughput"]["median"] == pytest.approx(gain)

    def test_a_stage_that_is_prepared_for_nothing_is_not_timed(self) -> None:
        def later(runs: list[list[Told]]) -> None:
            for run in runs:
                if run[0]["system"] == "perfect":
                    for rank in run:
                        rank["freed"] = [20]
                        rank["began"] = [
                            t + (5.0 if s >= 20 else 0) for s, t in enumerate(rank["began"])
                        ]
                        rank["ended"] = [
                            t + (5.0 if s >= 20 else 0) for s, t in enumerate(rank["ended"])
                        ]

        assert measured(later) == measured()

    @pytest.mark.parametrize(
        ("key", "value", "complaint"),
        [
            ("tokens", "c", "different tokens"),
            ("wrong", 1, "1 rows or slots of another expert"),
            ("layouts", ["start"], "different layouts"),
        ],
    )
    def test_a_run_that_went_wrong_has_no_figures(
        self, key: str, value: object, complaint: str
    ) -> None:
        def wrong(runs: list[list[Told]]) -> None:
            runs[4][0][key] = value

        with pytest.raises(RuntimeError, match=complaint):
            measured(wrong)

    def test_systems_with_other_plans_are_not_compared(self) -> None:
        def other(runs: list[list[Told]]) -> None:
            for rank in runs[4]:
                rank["plans"] = ["another", *rank["plans"][1:]]

        with pytest.raises(RuntimeError, match="different plans"):
            measured(other)

    def test_a_system_that_fell_behind_the_plans_is_not_compared(self) -> None:
        def behind(runs: list[list[Told]]) -> None:
            for rank in runs[4]:
                rank["layouts"] = rank["layouts"][:-1]

        with pytest.raises(RuntimeError, match="fell behind"):
            measured(behind)


class TestPage:
    def lines(self, found: Told) -> str:
        text: list[str] = page.text({"centre": found})
        return "\n".join(text)

    def test_bars_that_hold_are_met(self) -> None:
        found = measured()
        for bars in found["bars"].values():
            bars["p99"]["median"], bars["stall"]["median"] = 1.05, 20.0
            bars["throughput"]["median"] = 0.8
        assert "`boundary`: met at all 1 points." in self.lines(found)

    @pytest.mark.parametrize(
        ("key", "value", "name"),
        [("p99", 1.051, "P99"), ("stall", 19.9, "stall"), ("throughput", 0.79, "throughput")],
    )
    @pytest.mark.parametrize("broken", [False, True])
    def test_a_bar_that_is_missed_shows_as_missed(
        self, key: str, value: float, name: str, broken: bool
    ) -> None:
        found = measured()
        for bars in found["bars"].values():
            bars["p99"]["median"], bars["stall"]["median"] = 1.0, 50.0
            bars["throughput"]["median"] = 0.9
        found["bars"]["locked"][key]["median"] = float("nan") if broken else value
        text = self.lines(found)
        assert f"`locked`: missed at centre: {name}." in text
        assert f"| **no**: {name} |" in text

    def test_host_cost_says_whether_its_bars_are_met(self) -> None:
        def row(bar: float | None, value: float) -> Told:
            return {
                "what": "w",
                "bar": bar,
                "microseconds": {"median": value, "lowest": value, "highest": value},
            }

        text = page.host({"rows": [row(5.0, 5.0), row(5.0, 5.1), row(None, 9.0)]})
        assert [line.rsplit("|", 2)[1].strip() for line in text[4:7]] == ["yes", "**no**", ""]


def test_modules_are_those_of_this_folder() -> None:
    modules: list[ModuleType] = [emulation, device, link, board, traffic, figures, page]
    assert {Path(module.__file__ or "").parent for module in modules} == {BENCHMARKS}
