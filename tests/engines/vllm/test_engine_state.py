"""What the runner says of a step reaches the counters, and what was asked for the engine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.backends.cpu import BACKEND as CPU
from equipoise.balancer.experts.config import ShareMode
from equipoise.hal.stream import Role
from equipoise.integrations.vllm.eplb.router import StepCounter
from equipoise.integrations.vllm.settings import EplbSettings
from equipoise.integrations.vllm.streams import EngineStreams, HostEngineStreams

pytestmark = pytest.mark.filterwarnings("ignore")
AGAIN = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
COUNTS = st.lists(st.integers(0, 9), min_size=2, max_size=2)
STEPS = st.lists(st.tuples(COUNTS, st.booleans()), min_size=1, max_size=6)
"""By step: rows of two experts, and whether it carried nobody's tokens."""


@pytest.fixture
def streams() -> Iterator[EngineStreams]:
    accelerator = CPU.open(0)
    yield HostEngineStreams(accelerator.stream(Role.COMPUTE), WATCHDOG)
    accelerator.close()


class Balancer:
    """The parts of a balancer that a step uses: counters of two families, and boundaries."""

    def __init__(self) -> None:
        self.counters = [torch.zeros(1, 2, dtype=torch.int32) for _ in range(2)]
        self.boundaries: list[int] = []

    def before_step(self, step: int) -> None:
        self.boundaries.append(step)


class Worker:
    """A state with one model in it, as `add_model` leaves it."""

    def __init__(self, streams: EngineStreams) -> None:
        from equipoise.integrations.vllm.eplb.state import BalancedModel, LayerCoverage

        self.balancer, self.config = Balancer(), object()
        before = [one.clone() for one in self.balancer.counters]
        balancer: Any = self.balancer
        placeholder: Any = SimpleNamespace()
        row_totals = [torch.zeros((), dtype=torch.int32) for _ in range(2)]
        self.served = BalancedModel(
            balancer,
            placeholder,
            row_totals,
            StepCounter(),
            before,
            streams,
            LayerCoverage.EVERY_LAYER,
        )
        self.state = state()
        self.state._worker_context = SimpleNamespace(streams=streams)
        self.state.model_states["one"] = self.served
        self.state._by_config[id(self.config)] = self.config, self.served
        with streams.ordered_section():
            self.served.begin_step()

    def count(self, rows: list[int]) -> None:
        """A forward came by, with rows for the experts; twice as many in the second family."""
        for factor, counters in enumerate(self.balancer.counters, 1):
            counters += factor * torch.tensor([rows], dtype=torch.int32)

    @property
    def row_counts(self) -> list[list[int]]:
        return [one[0].tolist() for one in self.balancer.counters]


def state(**options: Any) -> Any:
    from equipoise.integrations.vllm.eplb.state import EquipoiseEplbState

    return EquipoiseEplbState(SimpleNamespace(), torch.device("cpu"), EplbSettings(**options), None)


@AGAIN
@given(STEPS)
def test_engine_state_step_discards_counts_of_dummy_steps(
    streams: EngineStreams, steps: list[tuple[list[int], bool]]
) -> None:
    worker = Worker(streams)
    for rows, dummy in steps:
        worker.count(rows)
        worker.state.step(is_dummy=dummy)
    sums = [sum(rows[expert] for rows, dummy in steps if not dummy) for expert in range(2)]
    assert worker.row_counts == [sums, [2 * one for one in sums]]
    assert worker.balancer.boundaries == list(range(len(steps) + 1))


@AGAIN
@given(COUNTS, COUNTS)
def test_engine_state_discards_counts_of_warm_up_only(
    streams: EngineStreams, warm: list[int], real: list[int]
) -> None:
    worker = Worker(streams)
    worker.count(warm)
    worker.state.prepare_forward(worker.config, 3)
    assert worker.row_counts == [[0, 0], [0, 0]]
    worker.count(real)
    worker.state.prepare_forward(worker.config, 3)
    assert worker.row_counts == [real, [2 * one for one in real]]


def test_engine_state_profile_forward_is_no_step(streams: EngineStreams) -> None:
    worker = Worker(streams)
    worker.count([1, 2])
    worker.state.step(is_profile=True, is_dummy=True)
    assert worker.row_counts == [[1, 2], [2, 4]]
    assert (worker.served.step_counter.step, worker.balancer.boundaries) == (0, [0])


@AGAIN
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_engine_state_splits_token_count_among_micro_batches(
    streams: EngineStreams, tokens: int, cut: int, padding: int
) -> None:
    from vllm.v1.worker.ubatch_utils import UBatchSlice

    end = max(tokens, cut) + padding
    slices = [UBatchSlice(slice(0, 1), one) for one in (slice(0, cut), slice(cut, end))]
    worker = Worker(streams)
    worker.state.prepare_forward(worker.config, tokens, slices)
    unpadded_rows = [int(one) for one in worker.served.unpadded_rows]
    assert unpadded_rows == [min(tokens, cut), max(0, tokens - cut)]
    worker.state.prepare_forward(worker.config, tokens)
    assert int(worker.served.unpadded_rows[0]) == tokens


def test_layer_state_masks_with_token_count_of_its_micro_batch() -> None:
    from vllm.distributed.eplb.eplb_state import EplbLayerState

    from equipoise.integrations.vllm.eplb.layer_state import LayerState

    rows: Any = SimpleNamespace(to_slots=lambda ids, filled: ids + filled)
    stock = EplbLayerState()
    stock.num_unpadded_tokens_tensors = [torch.tensor(10), torch.tensor(20)]
    layer_state = LayerState(rows, stock)
    ids = torch.tensor([[1, 2]])
    slots = [layer_state.map_and_record(ids, one).tolist() for one in range(2)]
    assert slots == [[[11, 12]], [[21, 22]]]
    assert layer_state.map_and_record(ids).tolist() == slots[0]


@given(st.integers(1, 400), st.integers(1, 400))
def test_sub_window_is_divisor_nearest_to_quarter_of_window(window: int, interval: int) -> None:
    from equipoise.balancer.experts.config import default_sub_window

    sub_window = default_sub_window(window, interval)
    assert sub_window <= window
    assert interval % sub_window == 0
    quarter = max(window / 4, 1.0)
    others = [n for n in range(1, window + 1) if interval % n == 0]
    factor = max(sub_window / quarter, quarter / sub_window)
    assert all(factor <= max(n / quarter, quarter / n) + 1e-9 for n in others)


def engine(window: int, interval: int) -> Any:
    """An engine config with the fields of vLLM's `EPLBConfig`."""
    from vllm.config.parallel import EPLBConfig

    return EPLBConfig(
        window_size=window,
        step_interval=interval,
        log_balancedness=True,
        log_balancedness_interval=7,
    )


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 4), st.floats(0, 4))
def test_engine_config_follows_settings_and_eplb_config(
    window: int, interval: int, gain: float, target: float
) -> None:
    from equipoise.balancer.experts.config import default_sub_window
    from equipoise.integrations.vllm.eplb.config import balancer_config

    eplb_settings = EplbSettings(shares="exact", min_gain=gain, target=target, timeout=3.0)
    config = balancer_config(eplb_settings, engine(window, interval), 5, 2, 4)
    part = default_sub_window(min(window, interval), interval)
    assert (config.sub_window, config.step_interval) == (part, interval)
    assert config.window_size == min(window, interval) // part * part
    assert (config.min_gain, config.planner.target) == (gain, target)
    assert (config.name, config.shares, config.ranks_sharing_rows) == ("vllm5", ShareMode.EXACT, 2)
    assert (config.log_balancedness, config.log_balancedness_interval) == (True, 7)
    assert config.nodes == 4
    assert config.timeout == 3.0


def test_engine_config_takes_sub_window_from_settings() -> None:
    from equipoise.integrations.vllm.eplb.config import balancer_config

    config = balancer_config(EplbSettings(sub_window=4), engine(12, 24), 0, 1, 1)
    assert (config.sub_window, config.window_size, config.step_interval) == (4, 12, 24)
