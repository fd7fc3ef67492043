"""Quantised experts that are moved are what vLLM's own loader makes of them in the other slot."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.hal.errors import ModelIncomplete

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
MOVED = (
    "FP8_BLOCK",
    "FP8_BLOCK_MARLIN",
    "FP8_TENSOR",
    "FP8_STATIC",
    "FP8_STATIC_FLASHINFER",
    "NVFP4_EMULATION",
    "NVFP4_MARLIN",
    "NVFP4_CUTLASS",
    "NVFP4_FLASHINFER",
    "MXFP4_MARLIN",
    "INT4_TRITON",
)
REFUSED = ("INT4_GPTQ", "INT4_AWQ", "INT4_PACKED")
ORDER = (2, 0, 3, 1)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups, of one process, and its configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as groups

    store = tmp_path_factory.mktemp("groups") / "store"
    with set_current_vllm_config(VllmConfig()):
        groups.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        groups.initialize_model_parallel(1, 1)
        yield
        groups.destroy_model_parallel()
        groups.destroy_distributed_environment()


def load_ranks(name: str, order: Sequence[int]) -> list[Any]:
    """The experts of both ranks."""
    from vllm_cpu.quantised import RANKS, Format, load

    return [load(Format[name], rank, order) for rank in range(RANKS)]


def model_of(experts: Any) -> Any:
    """As vLLM's models list their experts."""
    from engines.vllm.test_engine_model import own_router
    from vllm_cpu.quantised import EXPERTS, SLOTS_PER_RANK

    layer = SimpleNamespace(
        router=own_router(), routed_experts=experts, do_naive_dispatch_combine=False
    )
    return SimpleNamespace(
        moe_layers=[layer],
        expert_weights=[list(experts.get_expert_weights())],
        num_local_physical_experts=SLOTS_PER_RANK,
        num_logical_experts=EXPERTS,
    )


def all_tensors(experts: Any) -> dict[str, Tensor]:
    """Whatever the module, its method and its kernel hold."""
    from equipoise.integrations.vllm.eplb.model import expert_tensors

    return dict(expert_tensors(model_of(experts)))


def move(ranks: Sequence[Any], order: Sequence[int]) -> None:
    """Put expert `order[e]` where e is, by the tensors that are registered."""
    from vllm_cpu.quantised import EXPERTS, REDUNDANT, SLOTS_PER_RANK

    weights = [experts.get_expert_weights() for experts in ranks]
    before = [[tensor.clone() for tensor in tensors] for tensors in weights]
    for slot, expert in enumerate((*range(EXPERTS), *range(REDUNDANT))):
        rank, place = divmod(slot, SLOTS_PER_RANK)
        source, source_place = divmod(order[expert], SLOTS_PER_RANK)
        for tensor, old in zip(weights[rank], before[source], strict=True):
            tensor[place].copy_(old[source_place])


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", MOVED)
def test_moved_quantised_experts_equal_freshly_loaded_ones(name: str, one_rank: None) -> None:
    from vllm_cpu.quantised import kernels

    from equipoise.integrations.vllm.eplb.model import expert_model

    with kernels():
        moved, loaded = load_ranks(name, range(len(ORDER))), load_ranks(name, ORDER)
    for experts in moved:
        expert_model(model_of(experts), name, torch.device("cpu"))
    move(moved, ORDER)
    for after, fresh in zip(map(all_tensors, moved), map(all_tensors, loaded), strict=True):
        assert after.keys() == fresh.keys()
        assert any(key.startswith("layers.0.quant_config._w1.") for key in after)
        differing = [
            key for key in after if not torch.equal(*map(as_bytes, (after[key], fresh[key])))
        ]
        assert differing == []


@pytest.mark.parametrize("name", REFUSED)
def test_vllm_refuses_quantised_experts_that_it_cannot_move(name: str, one_rank: None) -> None:
    from vllm_cpu.quantised import kernels

    with kernels(), pytest.raises(NotImplementedError, match="EPLB is not supported"):
        load_ranks(name, ORDER)


@pytest.mark.parametrize("place", ["kernel", "kernel.experts", "quant_config._w1", "method"])
def test_expert_model_names_derived_tensor_that_would_stay(place: str, one_rank: None) -> None:
    from vllm_cpu.quantised import SLOTS_PER_RANK, kernels

    from equipoise.integrations.vllm.eplb.model import expert_model

    with kernels():
        experts = load_ranks("FP8_TENSOR", ORDER)[0]
    method = experts.quant_method
    method.moe_kernel.fused_experts.experts = SimpleNamespace()
    holder = {
        "kernel": method.moe_kernel.fused_experts,
        "kernel.experts": method.moe_kernel.fused_experts.experts,
        "quant_config._w1": method.moe_quant_config._w1,
        "method": method,
    }[place]
    holder.alpha_or_gscale = torch.arange(SLOTS_PER_RANK).float()
    with pytest.raises(ModelIncomplete, match=rf"{place}\.alpha_or_gscale"):
        expert_model(model_of(experts), "derived", torch.device("cpu"))


def test_shared_scales_include_those_that_the_kernel_holds(one_rank: None) -> None:
    from vllm_cpu.quantised import kernels

    from equipoise.integrations.vllm.eplb.model import shared_scales

    with kernels():
        experts = load_ranks("FP8_STATIC_FLASHINFER", ORDER)[0]
    names = [name for name, _ in shared_scales(model_of(experts))]
    assert "layers.0.w13_input_scale" in names
    assert "layers.0.quant_config._a1.alpha_or_gscale" in names


def test_expert_model_takes_constants_of_a_kernel(one_rank: None) -> None:
    from vllm_cpu.quantised import SLOTS_PER_RANK, kernels

    from equipoise.integrations.vllm.eplb.model import expert_model

    with kernels():
        experts = load_ranks("FP8_BLOCK", ORDER)[0]
    # As FlashInfer's: the same limit for every slot.
    experts.quant_method.moe_kernel.fused_experts.gemm1_clamp_limit = torch.full(
        (SLOTS_PER_RANK,), 7.0
    )
    # As placeholders that a format does not use.
    experts.quant_method.moe_kernel.fused_experts.unused = torch.empty(0, 3)
    expert_model(model_of(experts), "constants", torch.device("cpu"))
