"""Experts of quantised checkpoints, by vLLM's own loaders and without a GPU's kernels.

    with loading(Format.FP8_BLOCK):
        experts = load(Format.FP8_BLOCK, rank=0, order=(0, 1, 2, 3))

vLLM's `RoutedExperts` with the quantisation method of a format: its parameters, its weight loader,
and the conversion into what a kernel reads. Stand-ins are `kernels` (a GPU's check of itself, and
operations that only a GPU has: each works on one expert alone) and the kernel, which is made but
never runs.
"""

import copy
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import vllm.model_executor.layers.fused_moe.experts as kernel_modules
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config

EXPERTS, REDUNDANT, RANKS = 4, 2, 2
SLOTS_PER_RANK = (EXPERTS + REDUNDANT) // RANKS
WIDTH = 256
"""Of a token and of an expert."""
INPUT_SCALE = 0.75
"""The same for all experts: ranks would reduce it, and there is one process here."""
NVFP4 = {
    "quantization": {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
    }
}
FP8: Mapping[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NONE: Mapping[str, Any] = {}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
PACKED = {"targets": ["Linear"], "weights": INT4, "input_activations": None}


class Format(Enum):
    """A format of checkpoints and a kernel for it: vLLM's word for both, and its configuration."""

    FP8_BLOCK = "fp8", "triton", {**FP8, "weight_block_size": [128, 128]}
    FP8_BLOCK_MARLIN = "fp8", "marlin", {**FP8, "weight_block_size": [128, 128]}
    FP8_TENSOR = "fp8", "triton", FP8
    FP8_STATIC = "fp8", "triton", {**FP8, "activation_scheme": "static"}
    FP8_STATIC_FLASHINFER = "fp8", "flashinfer_cutlass", {**FP8, "activation_scheme": "static"}
    NVFP4_EMULATION = "modelopt_fp4", "emulation", NVFP4
    NVFP4_MARLIN = "modelopt_fp4", "marlin", NVFP4
    NVFP4_CUTLASS = "modelopt_fp4", "cutlass", NVFP4
    NVFP4_FLASHINFER = "modelopt_fp4", "flashinfer_cutlass", NVFP4
    MXFP4_MARLIN = "mxfp4", "marlin", NONE
    INT4_GPTQ = (
        "auto_gptq",
        "marlin",
        {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    )
    INT4_AWQ = "auto_awq", "marlin", {"bits": 4, "group_size": 128, "zero_point": True}
    INT4_TRITON = (
        "compressed-tensors",
        "triton",
        {"format": "pack-quantized", "config_groups": {"all": PACKED}, "ignore": []},
    )
    INT4_PACKED = (
        "compressed-tensors",
        "marlin",
        {"format": "pack-quantized", "config_groups": {"all": PACKED}, "ignore": []},
    )

    @property
    def kernel(self) -> str:
        """vLLM's word for the kernel."""
        return str(self.value[1])

    def config(self) -> Any:
        """vLLM's configuration of the format."""
        name, _, options = self.value
        return get_quantization_config(name).from_config(copy.deepcopy(dict(options)))


@contextmanager
def kernels() -> Iterator[None]:
    """As on a GPU that has every kernel, as far as vLLM asks before it converts weights."""
    for kind in Format:
        kind.config()  # Imports what is to be patched.
    for found in pkgutil.iter_modules(kernel_modules.__path__):
        _import_if_possible(f"{kernel_modules.__name__}.{found.name}")
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (modular_kernel.FusedMoEExperts, "is_supported_config", staticmethod(_supported)),
            (_custom_ops, "scaled_fp8_quant", _scaled_fp8),
            (_custom_ops, "gptq_marlin_repack", _repacked),
            (Tensor, "cuda", lambda tensor, *_, **__: tensor),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        for module in [each for each in sys.modules.values() if _of_vllm(each)]:
            for name in vars(module).copy():
                if name == "marlin_make_workspace_new":
                    stack.enter_context(patch.object(module, name, _workspace))
                if name.startswith("make_") and name.endswith("_moe_kernel"):
                    stack.enter_context(patch.object(module, name, _kernel))
        yield


def load(kind: Format, rank: int, order: Sequence[int]) -> Any:
    """Load the slots of a rank from a checkpoint in which expert e is that of number `order[e]`."""
    experts = _empty(kind, rank)
    weights = [
        (f"{expert}.{projection}.{name}", tensor)
        for expert, number in enumerate(order)
        for projection, name, tensor in _checkpoint(experts, number)
    ]
    assert list(experts.load_weights(weights)), "nothing was loaded"
    experts.quant_method.process_weights_after_loading(experts)
    return experts


def _empty(kind: Format, rank: int) -> Any:
    parallel = FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=RANKS,
        ep_size=RANKS,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=rank,
        ep_rank=rank,
        sp_size=1,
        use_ep=True,
        all2all_backend="allgather_reducescatter",
        enable_eplb=True,
    )
    slots = EXPERTS + REDUNDANT
    config = FusedMoEConfig(
        num_experts=slots,
        experts_per_token=2,
        hidden_dim=WIDTH,
        intermediate_size=WIDTH,
        num_local_experts=SLOTS_PER_RANK,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        moe_backend=kind.kernel,
    )
    return RoutedExperts(
        layer_name="model.layers.0.mlp.experts",
        params_dtype=torch.bfloat16,
        moe_config=config,
        quant_config=kind.config(),
        expert_map_manager=ExpertMapManager(
            max_num_batched_tokens=64,
            top_k=2,
            global_num_experts=slots,
            num_redundant_experts=REDUNDANT,
            num_expert_group=None,
            moe_parallel_config=parallel,
            placement_strategy="linear",
            enable_eplb=True,
        ),
    )


def _checkpoint(experts: Any, number: int) -> Iterator[tuple[str, str, Tensor]]:
    """Yield projection, name and tensor of one expert, of what the format has."""
    for at, (parameter, value) in enumerate(experts.named_parameters()):
        family, name = parameter.split("_", 1)
        shape = tuple(value.shape[1:])
        projections = ["down_proj"]
        if family == "w13":
            projections = ["gate_proj", "up_proj"]
            shape = (shape[0] // 2, *shape[1:]) if len(shape) > 1 else ()
        for half, projection in enumerate(projections):
            seed = torch.Generator().manual_seed(100 * number + 10 * at + half)
            yield projection, name, _drawn(name, shape, value.dtype, seed, number)


def _drawn(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: torch.Generator, number: int
) -> Tensor:
    match name:
        case "input_scale":
            return torch.tensor(INPUT_SCALE)
        case "weight_scale_2":  # The same for gate and up.
            return torch.tensor(0.1 + 0.01 * number)
    if dtype == torch.uint8:  # Exponents are such as checkpoints have.
        most = 130 if "scale" in name else 256
        return torch.randint(0, most, shape, generator=seed, dtype=dtype)
    drawn = torch.rand(shape, generator=seed)
    return (drawn + 0.5 if "scale" in name else 2 * drawn - 1).to(dtype)


def _supported(kernel: Any, config: Any, *_: object) -> tuple[bool, str | None]:
    """What is left of the question without the device: whether a kernel goes with EPLB."""
    supported = kernel._supports_parallel_config(config.moe_parallel_config)
    return supported, None if supported else "it does not go with EPLB"


def _scaled_fp8(value: Tensor, scale: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _repacked(b_q_weight: Tensor, size_k: int, **_: object) -> Tensor:
    """Another shape, as Marlin's; the order of what is in it does not matter here."""
    return b_q_weight.reshape(size_k // 16, -1).clone()


def _workspace(*_: object, **__: object) -> Tensor:
    return torch.zeros(7, dtype=torch.int32)


def _kernel(*, moe_quant_config: Any, experts_cls: Any, **_: object) -> Any:
    """What vLLM holds on to: the experts' part, with what it is configured with."""
    fused: Any = object.__new__(experts_cls)
    fused.quant_config = moe_quant_config
    return SimpleNamespace(fused_experts=fused, is_monolithic=False)


def _import_if_possible(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        return


def _of_vllm(module: Any) -> bool:
    return str(getattr(module, "__name__", "")).startswith("vllm.")
