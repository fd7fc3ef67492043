"""The benchmark of NVIDIA's devices, in small on the processor: its parts, its ends, its numbers.

No time is asserted: what is timed here means nothing.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.linear_program import optimum as by_linear_program

from equipoise.hal.stream import Role

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    clock, copies, kernels, optimum, place, routing, run, vllm = (
        importlib.import_module(f"cuda_{name}")
        for name in ("clock", "copies", "kernels", "optimum", "place", "routing", "run", "vllm")
    )
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def here() -> Any:
    with place.opened("cpu") as found:
        yield found


def program(code: str, *paths: Path) -> "subprocess.CompletedProcess[str]":
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=told, capture_output=True, text=True, timeout=240, check=False
    )


class TestEnds:
    def test_without_a_device_it_says_why_in_a_line_and_ends_with_2(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(run.main.__globals__, "missing", lambda name: f"{name}: no device")
        monkeypatch.setitem(run.main.__globals__, "save", None)
        assert run.main([]) == 2
        assert capsys.readouterr().err == "cuda.py cannot run here: cuda: no device\n"

    def test_a_backend_that_there_is_not_is_missing_and_one_that_there_is_is_not(self) -> None:
        assert "unknown backend 'abacus'" in place.missing("abacus")
        assert place.missing("cpu") is None

    def test_a_trial_is_called_one_and_keeps_nothing(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(run.main.__globals__, "save", None)
        assert run.main(["--backend", "cpu", "--only", "kernels", "copies"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("A trial of the program on cpu, in small; nothing is kept.\n")
        assert all(line.startswith("trial, ") for line in out.splitlines()[1:])
        assert "yes" not in out

    def test_only_parts_of_it_are_not_kept(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept: list[str] = []
        measured = {"device": dict.fromkeys(("device", "driver", "runtime", "torch", "triton"), "")}
        for name, found in (
            ("missing", lambda name: None),
            ("measured", lambda chosen: measured),
            ("save", lambda name, command, figures: kept.append(name)),
        ):
            monkeypatch.setitem(run.main.__globals__, name, found)
        assert run.main(["--only", "copies"]) == 0
        assert kept == []
        assert run.main([]) == 0
        assert kept == ["cuda"]
        assert "| OWED |" in capsys.readouterr().out

    def test_the_vendor_s_package_is_not_hidden_by_the_script_of_its_name(
        self, tmp_path: Path
    ) -> None:
        bindings = tmp_path / "cuda" / "bindings"
        bindings.mkdir(parents=True)
        (bindings / "__init__.py").write_text("found = 7\n")
        code = "from cuda.bindings import found; print(found)"
        assert program(code, BENCHMARKS, tmp_path).stdout == "7\n"
        alone = program(code, BENCHMARKS)
        assert "ModuleNotFoundError: No module named 'cuda'" in alone.stderr


class TestClock:
    @given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=9))
    def test_a_spread_is_median_least_and_most(self, values: list[float]) -> None:
        found = clock.spread(values)
        assert (found["lowest"], found["highest"]) == (min(values), max(values))
        assert found["median"] == pytest.approx(float(np.median(values)))

    def test_ratios_are_of_one_round_each(self) -> None:
        assert clock.paired([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {
            "median": 2.0,
            "lowest": 1.0,
            "highest": 3.0,
        }

    def test_contestants_take_turns_and_each_round_begins_with_another(self) -> None:
        told: list[str] = []

        def contestant(name: str) -> Callable[[], float]:
            def timed() -> float:
                told.append(name)
                return 1.0

            return timed

        contestants = {name: contestant(name) for name in "abc"}
        assert clock.in_turns(contestants, 3) == dict.fromkeys("abc", [1.0] * 3)
        assert "".join(told) == "abcbcacab"

    def test_a_graph_holds_as_many_launches_as_are_told_of(self, here: Any) -> None:
        seen: list[int] = []
        stream = here.accelerator.stream(Role.COMPUTE)
        timed = clock.repeated(
            here.clock(Role.COMPUTE), lambda: stream.launch(lambda: seen.append(1)), 5, here.graph()
        )
        before = len(seen)
        assert timed() > 0.0
        assert len(seen) - before == 5

    def test_marks_are_in_the_order_of_the_stream(self, here: Any) -> None:
        watch = here.clock(Role.COPY)
        first, second = watch.point(), watch.point()
        second.wait()
        assert second.since(first) >= 0.0


class TestOptimum:
    @given(st.data())
    def test_the_flow_finds_what_the_linear_program_finds(self, data: st.DataObject) -> None:
        ranks, here = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
        count = data.draw(st.integers(1, ranks * here))
        more = ranks * here - count
        extra = data.draw(st.lists(st.integers(0, count - 1), min_size=more, max_size=more))
        row = data.draw(st.permutations([*range(count), *extra]))
        load = np.array(data.draw(st.lists(st.integers(0, 999), min_size=count, max_size=count)))
        placement = np.array(row, dtype=np.int32)
        if not load.sum():
            assert optimum.optimum(load, placement, ranks) == 0.0
            return
        wanted = by_linear_program(load, placement, ranks)
        assert optimum.optimum(load, placement, ranks) == pytest.approx(wanted, abs=1e-6)

    def test_an_expert_that_has_one_rank_is_the_peak_of_it(self) -> None:
        placement = np.array([0, 1, 0, 2], dtype=np.int32)
        found = optimum.optimum(np.array([2, 10, 0]), placement, 2)
        assert found == pytest.approx(float(Fraction(10 * 2, 12) - 1))


class TestKernels:
    def test_every_kernel_has_its_row(self, here: Any) -> None:
        found = kernels.measured(here, kernels.TRIAL)
        assert [row["tokens"] for row in found["routing"]] == list(kernels.TRIAL.tokens)
        assert {row["what"] for row in found["others"]} == {
            "route_apportioned",
            "count",
            "commit_tables",
            "checksum",
        }
        assert 0.0 <= found["shares"]["gap"]["lowest"] <= found["shares"]["gap"]["highest"] < 0.01
        assert json.loads(json.dumps(found)) == found

    def test_tokens_choose_different_experts_and_the_likely_ones_more_often(self) -> None:
        odds = np.array([0.7, 0.1, 0.1, 0.05, 0.05])
        ids = routing.chosen(odds, 400, 2, 1)
        assert (ids[:, 0] != ids[:, 1]).all()
        counts = np.bincount(ids.ravel(), minlength=5)
        assert counts[0] == counts.max()
        assert np.array_equal(ids, routing.chosen(odds, 400, 2, 1))

    def test_replicas_are_the_slots_of_the_placement(self, here: Any) -> None:
        case = routing.Case.of(here, 1)
        replicas, copies = case.replicas.slots.numpy(), case.replicas.copies.numpy()
        for expert, (row, count) in enumerate(zip(replicas, copies, strict=True)):
            assert (row[count:] == -1).all()
            assert (case.layout.placement[0, row[:count]] == expert).all()
        assert copies.sum() == case.shape.slots

    def test_a_gap_is_seen_where_shares_are_bad(self, here: Any) -> None:
        case = routing.Case.of(here, 1)
        tables = case.tables
        held = int(tables.generation[0]) & 1
        good = routing.gap(
            case.loads, tables, 0, tables.cumulative[held, 0].numpy().astype(np.int64)
        )
        start = tables.start[held, 0].numpy()
        first_takes_all = np.full(case.shape.slots, 1 << 16, dtype=np.int64)
        assert (np.diff(start) > 0).all()
        assert routing.gap(case.loads, tables, 0, first_takes_all) > good

    def test_a_baseline_that_is_there_is_timed_beside_ours(
        self, here: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int] = []

        class Baseline:
            @staticmethod
            def torch_hash_and_count(ids: Any, *rest: Any) -> None:
                calls.append(ids.numel())

        monkeypatch.setitem(kernels.contestants.__globals__, "baseline", Baseline)
        case = routing.Case.of(here, kernels.TRIAL.layers)
        row = kernels.routing(kernels.Bench(case, kernels.TRIAL), 64)
        assert set(row["microseconds"]) == {"ours", "torch"}
        assert set(calls) == {64 * 8}


class TestOtherEngine:
    def test_what_is_not_installed_is_said_to_be(self, here: Any) -> None:
        if importlib.util.find_spec("vllm") is not None:
            pytest.skip("vLLM is installed")
        found = vllm.checked(here, kernels.TRIAL)
        assert found == {"said": vllm.ABSENT, "same": None}

    def test_a_kernel_of_another_signature_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(vllm.found.__globals__, "version", lambda: "9")
        assert "takes topk_ids, and" in vllm._fitting(lambda topk_ids: topk_ids)

        def fitting(
            topk_ids: Any,
            expert_load_view: Any,
            logical_to_physical_map: Any,
            logical_replica_count: Any,
            record_enabled: Any,
            num_unpadded_tokens: Any = None,
        ) -> None:
            """Nothing."""

        assert vllm._fitting(fitting) is fitting


class TestCopies:
    def test_every_way_copies_what_it_should(self, here: Any) -> None:
        found = copies.measured(here, copies.TRIAL)
        assert [row["way"] for row in found["rows"]] == [copies.HOST, copies.COMMIT, copies.SLOTS]
        for row in found["rows"]:
            assert row["asked_bytes"] == copies.TRIAL.slot[0]
            assert row["part"]["lowest"] <= row["part"]["median"] <= row["part"]["highest"]

    @given(st.integers(1 << 18, 1 << 27))
    def test_a_slot_is_two_matrices_with_their_scales_and_hardly_smaller_than_asked(
        self, size: int
    ) -> None:
        parts = copies.parts(size)
        step = 3 * (copies.BLOCK + copies.SCALE) * copies.EVEN
        assert size - step < sum(parts.values()) <= size
        assert all(part % 16 == 0 for part in parts.values())
        assert parts["w13"] == 2 * parts["w2"]
        assert parts["w13"] // parts["w13_scale"] == copies.BLOCK // copies.SCALE

    def test_a_copy_that_went_wrong_is_seen(self, here: Any) -> None:
        bench = copies.Bench(here, copies.TRIAL, copies.TRIAL.slot[0])
        sources = [[segment.data for segment in slot] for slot in bench._slots[:2]]
        with pytest.raises(RuntimeError, match="slot 2: w13 is not what was copied"):
            bench._check(range(2, 4), sources)
