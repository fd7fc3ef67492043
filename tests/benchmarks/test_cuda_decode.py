"""A decode step with and without an epoch, in small on the processor. No time is asserted."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.stream import Role

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    decode, experts, library, model, place, plans, serving = (
        importlib.import_module(f"cuda_{name}")
        for name in ("decode", "experts", "library", "model", "place", "plans", "serving")
    )
finally:
    sys.path.remove(str(BENCHMARKS))
SMALL = experts.Dimensions(
    hidden=128,
    intermediate=128,
    experts=16,
    slots=24,
    ranks=4,
    layers=2,
    tokens=16,
    top_k=2,
    rows=4,
)


@pytest.fixture(scope="module")
def here() -> Any:
    with place.opened("cpu") as found:
        yield found


class TestExperts:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
    def test_experts_are_of_their_size_and_the_same_from_one_seed(
        self, here: Any, dtype: str
    ) -> None:
        first, second = (experts.KINDS[dtype](here, SMALL, 3) for _ in range(2))
        for name, tensor in first.segments.items():
            assert tensor.shape[0] == SMALL.layers * SMALL.here
            assert torch.equal(tensor.view(torch.uint8), second.segments[name].view(torch.uint8))
        tokens = torch.randn((SMALL.here, SMALL.rows, SMALL.hidden)).bfloat16()
        done = first.apply(1, tokens)
        assert done.shape == tokens.shape
        assert torch.isfinite(done).all()
        assert not torch.equal(done, first.apply(0, tokens))

    def test_a_scale_is_of_its_own_block(self) -> None:
        matrix = torch.ones((256, 128)).to(torch.float8_e4m3fn)
        scale = torch.tensor([[2.0], [3.0]])
        found = experts.widened(torch.ones((1, 128)).bfloat16(), matrix, scale)
        assert found[0, 0] == 256.0
        assert found[0, 255] == 384.0

    def test_products_that_are_wrong_are_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        matrix = torch.ones((128, 128)).to(torch.float8_e4m3fn)
        wrong = lambda tokens, matrix, scale: torch.zeros((tokens.shape[0], 128))  # noqa: E731
        monkeypatch.setitem(experts.multiplied.__globals__, "scaled", wrong)
        way, multiply = experts.multiplied(matrix, torch.ones((1, 1)), 4)
        assert multiply is experts.widened
        assert "wrong here" in way
        monkeypatch.setitem(experts.multiplied.__globals__, "scaled", experts.widened)
        assert experts.multiplied(matrix, torch.ones((1, 1)), 4)[0] == "products scaled by blocks"

    def test_a_layer_adds_up_what_was_routed_here(self, here: Any) -> None:
        made = model.Model(here, SMALL, "bfloat16")
        elsewhere = torch.full((SMALL.tokens, SMALL.top_k), SMALL.slots, dtype=torch.int32)
        made.begin()
        made.layer(0, elsewhere)
        assert not made._output.any()
        elsewhere[3, 1] = 2
        made.layer(0, elsewhere)
        assert made._output.abs().sum(dim=1).nonzero().view(-1).tolist() == [3]

    def test_a_step_is_filled_up_for_the_clock_and_for_bytes(self, here: Any) -> None:
        made = model.Model(here, SMALL, "bfloat16")
        before = made.traffic
        made.fill_to(here.clock(Role.COMPUTE), 0.0, before + 1, 0.0)
        assert made.padding == 1
        assert made.traffic == before + SMALL.hidden**2 * 2
        made.fill_to(here.clock(Role.COMPUTE), 0.0, 0, 1.0)
        assert made.padding == 0


class TestHandedOn:
    @given(st.integers(2, 4), st.lists(st.integers(1, 60), min_size=1, max_size=8))
    def test_slots_of_the_first_rank_pass_their_experts_round(
        self, slots: int, turns: list[int]
    ) -> None:
        before = serving.contiguous(serving.Shape(2, 16, 24, 4))
        for turn in turns:
            after = plans.handed_on(before, 6, slots, turn)
            assert np.array_equal(after[:, 6:], before[:, 6:])
            assert np.array_equal(np.sort(after[:, :6]), np.sort(before[:, :6]))
            assert ((after != before).sum(axis=1) == slots).all()
            before = after

    @given(st.integers(1, 60))
    def test_one_slot_alone_takes_another_copy_each_time(self, turn: int) -> None:
        start = serving.contiguous(serving.Shape(2, 16, 24, 4))
        before = plans.handed_on(start, 6, 1, turn)
        after = plans.handed_on(before, 6, 1, turn + 1)
        assert ((after != before).sum(axis=1) == 1).all()
        assert set(after[0].tolist()) == set(range(16))


class TestDecode:
    @pytest.mark.parametrize("path", ["boundary", "locked"])
    @pytest.mark.parametrize("mode", decode.modes(place.Place(registry.accelerator("cpu"), None)))
    def test_epochs_end_well_beside_the_steps_and_none_opens_where_none_shall(
        self, here: Any, path: str, mode: Any
    ) -> None:
        made = model.Model(here, SMALL, "float8")
        weights = library.Library(made)
        with serving.group(here) as fabric:
            for slots in (2, 0):
                loop = serving.Serving(made, weights, fabric, serving.Setting(path, slots))
                found = loop.run(40, mode)
                loop.rest(mode)
                placement = loop._balancer.installed.layout.placement
                loop.close()
                assert len(found.seconds) == 40
                assert (found.epochs > 0) == (found.inside > 0) == bool(slots)
                start = serving.contiguous(loop._shape)
                assert np.array_equal(placement, start) == (not slots)

    def test_slots_that_hold_something_else_are_seen(self, here: Any) -> None:
        made = model.Model(here, SMALL, "bfloat16")
        weights = library.Library(made)
        with serving.group(here) as fabric:
            loop = serving.Serving(made, weights, fabric, serving.Setting("boundary", 0))
            made.experts.segments["w2"][SMALL.here + 1, 0, 0] += 1
            with pytest.raises(RuntimeError, match="layer 1, slot 1: holds what it should not"):
                loop.rest(decode.CAPTURED)
            loop.close()

    def test_the_library_has_what_the_slots_had(self, here: Any) -> None:
        made = model.Model(here, SMALL, "float8")
        weights = library.Library(made)
        for name, piece in zip(made.experts.segments, weights.view(1, 2), strict=True):
            held = made.experts.segments[name][SMALL.here + 2]
            assert torch.equal(held.view(torch.uint8), piece.view(torch.uint8))

    def test_slots_a_layer_keep_to_the_share_of_traffic(self, here: Any) -> None:
        made = model.Model(here, SMALL, "bfloat16")
        for path in ("boundary", "locked"):
            for padding in (0, 3_000, 9_000, 30_000):
                made.padding = padding
                slots = decode.slots_a_layer(made, path)
                a_step = decode.moved_bytes(made, path, slots) / plans.STEPS_OF_A_LOT[path]
                assert slots == 1 or a_step <= decode.SHARE * made.traffic
                assert 1 <= slots <= SMALL.here - 2

    def test_figures_of_runs_are_ratios_of_their_pairs(self, here: Any) -> None:
        made = model.Model(here, SMALL, "bfloat16")
        runs = [
            (serving.Run([0.011] * 99 + [0.022], 3, 80), serving.Run([0.010] * 100, 0, 0)),
            (serving.Run([0.012] * 100, 5, 90), serving.Run([0.010] * 100, 0, 0)),
        ]
        row = decode.figures(runs, made, "locked", 2)
        assert row["median_ratio"] == pytest.approx({"median": 1.15, "lowest": 1.1, "highest": 1.2})
        assert row["p99_ratio"]["lowest"] < row["p99_ratio"]["highest"]
        assert row["inside"] == pytest.approx(170 / 200)
        slot = sum(kind.nbytes for kind in (s.type for s in made.slots[0]))
        assert row["delivered"] == pytest.approx(2 * SMALL.layers * 8 * slot / 200)
        assert row["share"] == pytest.approx(4 * row["delivered"] / made.traffic)
        assert row["least_ms"] == pytest.approx(10.0)

    def test_pairs_begin_by_turns_with_and_without(self) -> None:
        told: list[str] = []

        class Loop:
            def __init__(self, name: str) -> None:
                self.name = name

            def run(self, steps: int, mode: Any) -> str:
                told.append(self.name)
                return self.name

            def rest(self, mode: Any) -> None:
                told.append("rest")

        found = list(decode.pairs(Loop("with"), Loop("without"), decode.CAPTURED, 2, 9))
        assert found == [("with", "without")] * 2
        assert [word for word in told if word != "rest"] == ["with", "without", "without", "with"]

    def test_a_backend_without_locks_or_graphs_is_measured_without_and_says_so(self) -> None:
        class Poor:
            name = "poor"
            capabilities = replace(
                registry.accelerator("cpu").capabilities, stream_lock=False, graph_capture=False
            )

        accelerator: Accelerator | None = None
        poor = place.Place(Poor(), accelerator)
        assert decode.paths(poor) == ("boundary",)
        assert decode.modes(poor) == (decode.LAUNCHED,)
        assert len(decode.left_out(poor)) == 2
