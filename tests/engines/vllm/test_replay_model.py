"""Plans, dispatch and first placement that replay computes for vLLM equal vLLM's own."""

import ast
import textwrap
import warnings
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.harnesses.vllm_policy import Standing, first_map, popular, standings, window
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise.balancer.experts.placement import ExpertShape, Load, Placement
from equipoise.report.replay.engine_model import WindowLoad
from equipoise.report.replay.engines.vllm import VLLM, DefaultPolicy

pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports in its turn
    import triton
    from vllm.config.parallel import EPLBConfig
    from vllm.distributed.eplb.eplb_state import EplbState, compute_logical_maps
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    from vllm.model_executor.layers.fused_moe.router import base_router

KERNEL = "_eplb_map_and_record_i32_kernel"
BLOCK = 256
REAL = ExpertShape(layers=6, experts=256, slots=288, ranks=32)
MapRows = Callable[[torch.Tensor, torch.Tensor, int], NDArray[np.int32]]


def planned_by_vllm(
    load: Load, installed: Placement, shape: ExpertShape, groups: int, nodes: int
) -> Placement:
    new = DefaultEplbPolicy.rebalance_experts(
        torch.from_numpy(load), shape.slots, groups, nodes, shape.ranks, torch.from_numpy(installed)
    )
    planned: Placement = new.numpy().astype(np.int32)
    return planned


def planned_by_replay(
    load: Load, installed: Placement, shape: ExpertShape, groups: int, nodes: int
) -> Placement:
    rows = WindowLoad(load, np.zeros_like(installed, dtype=np.int64), steps=1)
    return DefaultPolicy(groups, nodes)(rows, installed, shape)


@pytest.fixture(scope="module")
def map_rows(tmp_path_factory: pytest.TempPathFactory) -> MapRows:
    """vLLM's kernel, which it defines for GPUs only, in Triton's interpreter."""
    source = Path(str(base_router.__file__)).read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(source))
    [kernel] = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == KERNEL]
    text = textwrap.dedent(str(ast.get_source_segment(source, kernel)))
    file = tmp_path_factory.mktemp("kernel") / "kernel.py"
    head = "import triton\nimport triton.language as tl\n\n@triton.jit\n"
    file.write_text(head + text, encoding="utf-8")
    spec = spec_from_file_location("kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)

    def run(ids: torch.Tensor, placement: torch.Tensor, experts: int) -> NDArray[np.int32]:
        maps, counts = compute_logical_maps(placement, experts)
        slots = torch.empty(ids.numel(), dtype=torch.int32)
        load = torch.zeros(placement.numel(), dtype=torch.int32)
        grid = (triton.cdiv(ids.numel(), BLOCK),)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            vars(module)[KERNEL][grid](
                ids.contiguous(),
                counts,
                maps.contiguous(),
                slots,
                load,
                torch.ones((), dtype=torch.bool),
                torch.tensor(len(ids), dtype=torch.int32),
                experts,
                maps.shape[1],
                load.numel(),
                ids.numel(),
                ids.shape[1],
                HAS_NUM_UNPADDED=True,
                BLOCK_SIZE=BLOCK,
            )
        return slots.reshape(ids.shape).numpy()

    return run


@settings(max_examples=300, deadline=None)
@given(standings(), st.integers(1, 9), st.integers(1, 9))
def test_replay_plan_equals_vllm_for_drawn_loads(
    standing: Standing, groups: int, nodes: int
) -> None:
    """With ties, zeros and layers of nothing; groups that divide the experts, nodes as drawn."""
    shape, load = standing.shape, standing.problem.load
    groups = groups if shape.experts % groups == 0 else 1
    nodes = nodes if shape.ranks % nodes == 0 else 1
    arguments = load, standing.installed, shape, groups, nodes
    np.testing.assert_array_equal(planned_by_replay(*arguments), planned_by_vllm(*arguments))


@pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (8, 1), (8, 4), (2, 4)])
def test_replay_plans_equal_vllm_over_rebalances_at_real_size(groups: int, nodes: int) -> None:
    installed = VLLM.initial(REAL)
    for seed in range(3):
        load = window(popular(seed, REAL.layers, REAL.experts), seed)
        load[0] = 100
        load[1, ::2] = 0
        load[2] = load[2] // 4000
        load[3] = 2**26 + load[3] % 9  # which float32 makes equal or 8 apart
        expected = planned_by_vllm(load, installed, REAL, groups, nodes)
        installed = planned_by_replay(load, installed, REAL, groups, nodes)
        np.testing.assert_array_equal(installed, expected)


def test_replay_routes_as_vllm_kernel_for_drawn_batches(map_rows: MapRows) -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        ranks, size, top_k = (int(n) for n in rng.integers(1, 6, 3))
        experts = int(rng.integers(size, ranks * size + 1))
        shape = ExpertShape(2, experts, ranks * size, ranks)
        extra = rng.integers(0, experts, (2, shape.slots - experts))
        placement = np.concatenate([np.tile(np.arange(experts), (2, 1)), extra], axis=1)
        placement = rng.permuted(placement, axis=1).astype(np.int32)
        tokens = rng.integers(0, 70, ranks)
        ids = rng.integers(-1, experts, (int(tokens.sum()), top_k)).astype(np.int32)
        sources = np.repeat(np.arange(ranks, dtype=np.int32), tokens)
        slots = VLLM.rules[0].route(ids, sources, placement, shape, layer=1, step=seed)
        row = torch.from_numpy(placement[1]).long()
        for rank in np.flatnonzero(tokens):
            batch = torch.from_numpy(ids[sources == rank])
            expected = map_rows(batch, row, experts)
            np.testing.assert_array_equal(slots[sources == rank], expected)


def test_replay_initial_placement_is_that_of_vllm() -> None:
    built = EplbState.build_initial_global_physical_to_logical_map(256, 32)
    np.testing.assert_array_equal(VLLM.initial(REAL), np.tile(list(built), (REAL.layers, 1)))
    np.testing.assert_array_equal(VLLM.initial(REAL), first_map(REAL))


def test_replay_cadence_has_defaults_of_vllm() -> None:
    config = EPLBConfig()
    cadence = VLLM.cadence
    assert (cadence.window, cadence.interval) == (config.window_size, config.step_interval)
    assert cadence.first == config.step_interval // 4
    assert cadence.blocking is not config.use_async
