"""Cases for a pool of ranks: SGLang's `EPLBManager`, `ExpertLocationMetadata` and updater.

Stand-ins are the model (a tensor of marks for each layer), the recorder (it tells the loads of the
case), and SGLang's configuration. Weights go over gloo.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY
from sglang.srt.arg_groups import parallel_hook
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.eplb import (
    eplb_manager,
    expert_location,
    expert_location_dispatch,
    expert_location_updater,
)
from sglang.srt.eplb.eplb_manager import EPLBManager
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
from sglang.srt.layers.moe import topk
from sglang.srt.plugins.hook_registry import HookRegistry, _propagate_patch
from sglang.srt.runtime_context import get_resources
from sglang.srt.server_args import ServerArgs

from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import EquipoiseError
from equipoise.integrations.sglang import entry, local_dispatch, metrics

TIMEOUT = timedelta(seconds=60)
INTERVAL = 2
"""Forward passes between two rebalances."""
WIDTH = 8
MODEL_CONFIG = object()


class Recorder:
    """Tells one load after the other."""

    recording = True

    def __init__(self, loads: Sequence[Any]) -> None:
        self._loads = iter(loads)

    def dump_record(self, output_mode: str) -> dict[str, Any]:
        """(steps, layers, experts), as SGLang's recorder has summed them over ranks."""
        assert output_mode == "object"
        return {
            "logical_count": torch.tensor(next(self._loads), dtype=torch.int32),
            "average_utilization_rate_over_window": None,
        }


def balance(fabric: Fabric, address: str, loads: Any, **case: Any) -> dict[str, Any]:
    """Serve until every load was balanced for.

    Args:
        fabric: of the case, for rank and size.
        address: a file where the ranks meet, as a URL.
        loads: of each rebalance, (steps, layers, experts).
        case: `experts`, `redundant`, `chunk` (layers of a chunk, or None), `plugin` (what the
            environment has, or None), `dispatch` (SGLang's word).

    Returns:
        `maps`: the installed placement before the first rebalance and after each; `updates`: layers
        of each update; `marks`: whether every slot held its expert after every forward pass;
        `rows`: after each rebalance, (layers, slots) rows of this rank's part of the next load, by
        SGLang's own dispatch; `metrics`: what this process counted.
    """
    layers = len(loads[0][0])
    with ExitStack() as stack:
        stack.enter_context(group(fabric, address))
        stack.enter_context(served_metrics(address))
        stack.enter_context(plugin(case["plugin"]))
        numbers = ModelConfigForExpertLocation(layers, case["experts"], 1)
        stack.enter_context(
            configuration(fabric, numbers, case["redundant"], case["chunk"], case["dispatch"])
        )
        first = ExpertLocationMetadata.init_trivial(MODEL_CONFIG, fabric.control.rank)
        expert_location.set_global_expert_location_metadata(first, allow_overwrite=True)
        recorder = Recorder(loads)
        stack.enter_context(
            patch.object(eplb_manager, "get_global_expert_distribution_recorder", lambda: recorder)
        )
        weights = {layer: [expected_weights(layer, fabric.control.rank)] for layer in range(layers)}
        updates: list[list[int]] = []
        manager = make_manager(weights, updates)
        maps, held, rows = [installed_map()], [], []
        for number in range(len(loads)):
            for _ in range(INTERVAL):
                manager.on_forward_pass_end()
            # The rebalance, of which every chunk of layers but the first waits for a forward pass.
            for _ in range(1 if case["chunk"] is None else layers + 1):
                manager.on_forward_pass_end()
                held.append(weights_match_map(weights, fabric.control.rank))
                if case["chunk"] is not None and not in_rebalance(manager):
                    break
            maps.append(installed_map())
            rows += [dispatched(later, fabric) for later in loads[number + 1 : number + 2]]
            manager.reset_generator()
        return {
            "maps": maps,
            "updates": updates,
            "marks": all(held),
            "rows": rows,
            "metrics": counted(),
        }


def plan(fabric: Fabric, address: str, loads: Any, **case: Any) -> dict[str, Any]:
    """The metadata that SGLang plans for one window from its trivial placement.

    Args:
        fabric: of the case, for rank and size.
        address: a file where the ranks meet, as a URL.
        loads: (steps, layers, experts).
        case: as for `balance`, without `chunk`.

    Returns:
        By field, its `shape`, its `type`, and its `values`; None where it is no tensor.
    """
    numbers = ModelConfigForExpertLocation(len(loads[0]), len(loads[0][0]), 1)
    with ExitStack() as stack:
        stack.enter_context(group(fabric, address))
        stack.enter_context(plugin(case["plugin"]))
        stack.enter_context(
            configuration(fabric, numbers, case["redundant"], None, case["dispatch"])
        )
        recorder = Recorder([])
        stack.enter_context(
            patch.object(eplb_manager, "get_global_expert_distribution_recorder", lambda: recorder)
        )
        first = ExpertLocationMetadata.init_trivial(MODEL_CONFIG, fabric.control.rank)
        expert_location.set_global_expert_location_metadata(first, allow_overwrite=True)
        made: Any = make_manager({}, [])._compute_expert_location_metadata(
            torch.tensor(loads), broadcast_over_world=False
        )
        dist.barrier()  # nothing else is sent: one rank could leave while the other still connects
    return {
        name: {"shape": value.shape, "type": str(value.dtype), "values": value.tolist()}
        if isinstance(value, torch.Tensor)
        else None
        for name, value in vars(made).items()
    }


def dispatched(load: Any, fabric: Fabric) -> list[list[int]]:
    """(layers, slots): rows of each, by SGLang's dispatch, of one rank's part of a load.

    A slot that does not hold the expert that was asked for ends the case.
    """
    metadata: Any = expert_location.get_global_expert_location_metadata()
    torch.manual_seed(fabric.control.rank)
    rows = []
    for layer, counts in enumerate(torch.tensor(load).sum(dim=0) // fabric.control.size):
        # In the order of a batch: the experts of neighbouring tokens differ.
        ids = torch.arange(len(counts)).repeat_interleave(counts)
        ids = ids[torch.randperm(len(ids))]
        _, info = topk.resolve_routing_inputs(layer_id=layer, is_draft=False)
        slots = topk.topk_ids_logical_to_physical(ids[:, None], info)[:, 0]
        assert torch.equal(metadata.physical_to_logical_map[layer][slots], ids)
        rows.append(torch.bincount(slots, minlength=metadata.num_physical_experts).tolist())
    return rows


@contextmanager
def served_metrics(address: str) -> Iterator[None]:
    """As with `--enable-metrics`; what was counted is forgotten afterwards."""
    with patch.dict(os.environ, {metrics.FOLDER_VARIABLE: f"{address}-metrics"}):
        metrics.metrics.cache_clear()
        yield
        made = metrics.metrics()
        assert made is not None
        for metric in vars(made).values():
            REGISTRY.unregister(metric)
        metrics.metrics.cache_clear()


def counted() -> dict[str, float]:
    """The plugin's metrics in this process, by name."""
    return {
        sample.name: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("equipoise_sglang_") and not sample.name.endswith("_created")
    }


def start(fabric: Fabric, address: str, settings: str, **arguments: Any) -> dict[str, Any]:
    """What SGLang's own reading of its arguments comes to: the `error` that it ends with, None if
    it goes through; and the `dispatch` algorithm."""
    server_args, error = ServerArgs(model_path="none", **arguments), None
    with plugin(settings):
        try:
            parallel_hook.handle_eplb_and_dispatch(server_args)
        except EquipoiseError as raised:
            error = str(raised)
    return {"error": error, "dispatch": resolving_view(server_args).ep_dispatch_algorithm}


def in_rebalance(manager: Any) -> bool:
    """Whether a chunk of layers is still to be updated."""
    return manager._main_generator.gi_yieldfrom is not None


def make_manager(weights: Mapping[int, list[torch.Tensor]], updates: list[list[int]]) -> Any:
    """SGLang's own, with its own updater, whose calls are recorded."""
    updater: Any = ExpertLocationUpdater()
    update = updater.update

    def record_update(*args: Any, update_layer_ids: list[int], **kwargs: Any) -> Any:
        updates.append(list(update_layer_ids))
        return update(*args, update_layer_ids=update_layer_ids, **kwargs)

    updater.update = record_update
    model = SimpleNamespace(routed_experts_weights_of_layer=weights)
    return EPLBManager(
        model_config=MODEL_CONFIG,
        get_model=lambda: model,
        get_expert_location_updater=lambda: updater,
        get_expert_backup_client=lambda: None,
        get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
    )


def expected_weights(layer: int, rank: int) -> torch.Tensor:
    """(slots of a rank, width): what they hold by the installed map, layer and expert."""
    metadata: Any = expert_location.get_global_expert_location_metadata()
    size = metadata.num_local_physical_experts
    own = slice(rank * size, (rank + 1) * size)
    experts: torch.Tensor = metadata.physical_to_logical_map_cpu[layer, own]
    return (experts + 1000 * layer)[:, None].repeat(1, WIDTH).to(torch.float32)


def weights_match_map(weights: Mapping[int, list[torch.Tensor]], rank: int) -> bool:
    """Whether every slot holds the expert that the installed map names."""
    return all(
        torch.equal(tensor, expected_weights(layer, rank)) for layer, (tensor,) in weights.items()
    )


def installed_map() -> Any:
    """(layers, slots)."""
    metadata = expert_location.get_global_expert_location_metadata()
    return metadata.physical_to_logical_map_cpu.tolist()


@contextmanager
def group(fabric: Fabric, address: str) -> Iterator[None]:
    """The global process group, which the updater sends over."""
    rank, size = fabric.control.rank, fabric.control.size
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=size, timeout=TIMEOUT
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def plugin(settings: str | None) -> Iterator[None]:
    """The hooks of our plugin, registered and applied as SGLang does, and taken out behind it."""
    targets = (
        (EPLBManager, "_compute_expert_location_metadata"),
        (EPLBManager, "_compute_update_layer_ids_chunks"),
        (parallel_hook, "handle_eplb_and_dispatch"),
        (expert_location, "set_global_expert_location_metadata"),
        (ExpertLocationMetadata, "update"),
        (expert_location_dispatch, "topk_ids_logical_to_physical"),
        (topk, "resolve_routing_inputs"),
    )
    stock = [(owner, name, getattr(owner, name)) for owner, name in targets]
    try:
        with patch.dict(os.environ):
            os.environ.pop(entry.SETTINGS_VARIABLE, None)
            if settings is not None:
                os.environ[entry.SETTINGS_VARIABLE] = settings
            entry.register()
            HookRegistry.apply_hooks()
        yield
    finally:
        for owner, name, function in stock:
            _propagate_patch(getattr(owner, name), function, owner)
            setattr(owner, name, function)
        HookRegistry._hooks.clear()
        HookRegistry._patched.clear()
        resources = get_resources()
        dispatch = getattr(resources.expert_location_metadata, local_dispatch.DISPATCH, None)
        resources.expert_location_metadata = None
        if dispatch is not None:
            dispatch.close()


@contextmanager
def configuration(
    fabric: Fabric,
    numbers: ModelConfigForExpertLocation,
    redundant: int,
    chunk: int | None,
    dispatch: str,
    backend: str = "deepep",
    nodes: int = 1,
) -> Iterator[None]:
    """What SGLang's modules read of its configuration and of the device."""
    moe = SimpleNamespace(
        eplb_rebalance_layers_per_chunk=chunk,
        eplb_rebalance_num_iterations=INTERVAL,
        expert_distribution_recorder_buffer_size=1,
        eplb_min_rebalancing_utilization_threshold=1.0,
        eplb_algorithm="auto",
        ep_dispatch_algorithm=dispatch,
        ep_num_redundant_experts=redundant,
        ep_join_mode=None,
        moe_a2a_backend=backend,
    )
    parallel = SimpleNamespace(
        nnodes=nodes,
        ep_size=fabric.control.size,
        tp_rank=fabric.control.rank,
        elastic_ep_initial_size=None,
        ep_join_rank_offset=0,
    )
    parts = {
        "get_exec": SimpleNamespace(moe=moe),
        "get_parallel": parallel,
        "get_device": SimpleNamespace(device="cpu"),
        "get_model": SimpleNamespace(model_path="", load_format="auto"),
    }
    cpu = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    with ExitStack() as stack:
        modules = eplb_manager, expert_location, expert_location_dispatch, expert_location_updater
        for module in modules:
            for name in parts.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, lambda part=parts[name]: part))
        # Cached as the original is: the compiler looks behind the cache.
        stack.enter_context(patch.object(torch, "get_device_module", cache(lambda: cpu)))
        stack.enter_context(
            patch.object(ModelConfigForExpertLocation, "from_model_config", lambda _: numbers)
        )
        yield
