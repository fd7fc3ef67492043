"""Checks of vLLM's configuration for `eplb`: options that would cause a hang or wrong output."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from equipoise.integrations.vllm.settings import (
    COLLECTIVE_SHARES,
    COMMUNICATORS,
    MAX_PORT,
    EplbSettings,
)

RAY_EXECUTOR_VARIABLE = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
"""0 selects Ray's compiled graph, which calls the model runner without its worker."""
NCCL_CTAS_VARIABLE = "NCCL_MAX_CTAS"
IGNORED_EPLB_OPTIONS: dict[str, object] = {
    "policy": "default",
    "communicator": None,
    "use_async": True,
    "enable_migration_batching": False,
}
"""Options of `--eplb-config` that have no effect on our balancer, with vLLM's defaults."""
COOPERATIVE_ALL2ALL_BACKENDS = ("deepep_low_latency", "nixl_ep")
"""All-to-all backends whose kernels wait for each other across ranks and may fill the device."""


def eplb_config_errors(config: Any, settings: EplbSettings) -> list[str]:
    """List why `eplb` does not support a configuration of vLLM."""
    errors = [message for message, check in UNSUPPORTED.items() if check(config)]
    if settings.shares in COLLECTIVE_SHARES and captures_graphs(config):
        errors.append(
            f"shares {settings.shares} synchronizes ranks in every layer, which cannot be "
            "captured: use --enforce-eager, or shares local"
        )
    if settings.commit == "in_place":
        errors += [message for message, check in UNSUPPORTED_IN_PLACE.items() if check(config)]
    last_port = (settings.metrics_port or 0) + worker_count(config) - 1
    if last_port > MAX_PORT:
        errors.append(f"metrics_port: the last worker's would be {last_port}, above {MAX_PORT}")
    if settings.communicator is not None:
        errors += communicator_errors(config.device_config.device_type, settings)
    if settings.communicator != "gloo" and copies_may_deadlock(config, os.environ):
        errors.append(
            f"--all2all-backend {config.parallel_config.all2all_backend} and copies over NCCL may "
            f"wait for each other: set {NCCL_CTAS_VARIABLE}, to 8 say, or the communicator of "
            "eplb to gloo"
        )
    return errors


def communicator_errors(device: str, settings: EplbSettings) -> list[str]:
    """List why a device type does not support the configured communicator."""
    supported = COMMUNICATORS.get(device, ())
    if settings.communicator not in supported:
        return [
            f"communicator {settings.communicator} is not for a device of type {device}: "
            f"{' or '.join(supported) or 'no communicator of ours is'}"
        ]
    if settings.shares in COLLECTIVE_SHARES and settings.communicator != supported[0]:
        return [
            f"shares {settings.shares} gather the counts of a layer on the device, which "
            f"communicator {settings.communicator} cannot: use {supported[0]}, or shares local"
        ]
    return []


def ignored_eplb_options(config: Any) -> list[str]:
    """Name options of `--eplb-config` that are set and belong to vLLM's own EPLB alone."""
    eplb_config = getattr(config.parallel_config, "eplb_config", None)
    return [
        f"{name} {getattr(eplb_config, name)}"
        for name, default in IGNORED_EPLB_OPTIONS.items()
        if getattr(eplb_config, name, default) != default
    ]


def worker_count(config: Any) -> int:
    """Return the number of workers over all stages and data-parallel ranks."""
    parallel = config.parallel_config
    count: int = parallel.world_size * parallel.data_parallel_size
    return count


def captures_graphs(config: Any) -> bool:
    """Whether forward passes are captured in device graphs."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.name != "NONE"


def copies_may_deadlock(config: Any, environment: Mapping[str, str]) -> bool:
    """Whether our copies may deadlock with a cooperative all-to-all kernel.

    The kernel waits for blocks of the device that our copy occupies, and the copy waits for a peer
    that is in such a kernel (vLLM pull requests 32860 and 44978). A bound on NCCL's blocks avoids
    it.
    """
    return (
        config.parallel_config.all2all_backend in COOPERATIVE_ALL2ALL_BACKENDS
        and NCCL_CTAS_VARIABLE not in environment
    )


def uses_ray_compiled_graph(config: Any) -> bool:
    """Whether Ray calls the model runner without the worker that we extend."""
    ray = config.parallel_config.distributed_executor_backend == "ray"
    return ray and os.environ.get(RAY_EXECUTOR_VARIABLE, "1") == "0"


def skips_eplb_steps(config: Any) -> bool:
    """Whether the runner skips the EPLB step in some forward passes of some ranks."""
    parallel, pooling = config.parallel_config, config.model_config.runner_type == "pooling"
    skips = parallel.pipeline_parallel_size > 1 or (pooling and parallel.data_parallel_size > 1)
    return skips and not config.use_v2_model_runner


UNSUPPORTED_IN_PLACE: dict[str, Callable[[Any], bool]] = {
    "commit in_place locks a layer while it is read, which a captured graph does not: use "
    "--enforce-eager, or commit staged": captures_graphs,
    "commit in_place counts one pass of a layer per step, and two micro-batches make two": (
        lambda config: config.parallel_config.num_ubatches > 1
    ),
    "commit in_place needs every layer in every step, and a draft model skips some": (
        lambda config: config.speculative_config is not None
    ),
}
"""Unsupported configurations with `commit` `in_place`."""
UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "eplb does not follow elastic expert parallelism": lambda config: (
        config.parallel_config.enable_elastic_ep
    ),
    "eplb balances after every step of every rank, and --enable-fault-tolerance abandons steps and "
    "ranks": lambda config: config.parallel_config.enable_fault_tolerance,
    "eplb does not know which rows are padding with prefill context parallelism": lambda config: (
        config.parallel_config.prefill_context_parallel_size > 1
    ),
    "eplb keeps its tables where sleep mode throws them away": lambda config: (
        config.model_config.enable_sleep_mode
    ),
    "eplb moves experts from where a transfer of weights would put them": lambda config: (
        config.weight_transfer_config is not None
    ),
    "eplb moves experts, and not the LoRA weights that vLLM keeps by slot: no --enable-lora": (
        lambda config: config.lora_config is not None
    ),
    "eplb would move experts within the memory that --load-format ipc_cache shares": (
        lambda config: config.load_config.load_format == "ipc_cache"
    ),
    "eplb needs every forward of every rank counted, which model runner V1 does not do with "
    "several stages, nor with pooling models on data-parallel ranks": skips_eplb_steps,
    f"eplb is not called by Ray's compiled graph ({RAY_EXECUTOR_VARIABLE}=0)": (
        uses_ray_compiled_graph
    ),
}
"""Unsupported configurations, whatever the settings of `eplb`."""
