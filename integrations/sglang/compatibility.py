"""Supported releases of SGLang, and every symbol that the plugin uses, with its signature."""

from collections.abc import Mapping, Sequence

from equipoise.integrations.vllm.compatibility import (
    ANY_SIGNATURE,
    Release,
    Symbol,
    symbol_problems,
)

RELEASE = Release(
    "SGLang", ("sglang",), ("0.5.23",), accept_variable="EQUIPOISE_SGLANG_ACCEPT_VERSION"
)
REGISTRY = "sglang.srt.plugins.hook_registry"
MANAGER = "sglang.srt.eplb.eplb_manager"
LOCATION = "sglang.srt.eplb.expert_location"
OVERRIDES = "sglang.srt.arg_groups.overrides"
ARGUMENTS = "sglang.srt.arg_groups.parallel_hook"
RESOLVE = "handle_eplb_and_dispatch"
COMPUTE = "EPLBManager._compute_expert_location_metadata"
CHUNKS = "EPLBManager._compute_update_layer_ids_chunks"
DISPATCH = "sglang.srt.eplb.expert_location_dispatch"
TOPK = "sglang.srt.layers.moe.topk"
SET_METADATA = "set_global_expert_location_metadata"
UPDATE = "ExpertLocationMetadata.update"
MAP = "topk_ids_logical_to_physical"
ROUTING_INPUTS = "resolve_routing_inputs"
SYMBOLS = (
    Symbol(REGISTRY, "HookRegistry.register", "target, hook, hook_type=, *, source="),
    Symbol(REGISTRY, "HookType.AROUND", ANY_SIGNATURE),
    Symbol(ARGUMENTS, RESOLVE, "server_args"),
    Symbol(OVERRIDES, "resolving_view", ANY_SIGNATURE),
    Symbol(MANAGER, COMPUTE, "self, logical_count, *, broadcast_over_world"),
    Symbol(MANAGER, CHUNKS, "self"),
    Symbol("sglang.srt.elastic_ep.elastic_ep", "ElasticEPStateManager.instance", ""),
    Symbol(LOCATION, "get_global_expert_location_metadata", ""),
    Symbol(LOCATION, "ExpertLocationMetadata.num_logical_experts", ANY_SIGNATURE),
    Symbol(LOCATION, "get_exec", ""),
    Symbol(LOCATION, "get_parallel", ""),
    Symbol(
        LOCATION,
        "ExpertLocationMetadata",
        "physical_to_logical_map, physical_to_logical_map_cpu, logical_to_all_physical_map, "
        "logical_to_all_physical_map_cpu, logical_to_all_physical_map_num_valid, ep_size, "
        "logical_to_rank_dispatch_physical_map",
    ),
)
"""Used by `eplb_policy`."""
LOCAL_DISPATCH_SYMBOLS = (
    Symbol(
        "sglang.srt.arg_groups.overrides", "declare_resolution", "server_args, source, **fields"
    ),
    Symbol(LOCATION, SET_METADATA, "value, allow_overwrite="),
    Symbol(LOCATION, UPDATE, "self, other, update_layer_ids"),
    Symbol(DISPATCH, MAP, "topk_ids, info, log2phy_prob="),
    Symbol(
        DISPATCH,
        "ExpertLocationDispatchInfo",
        "ep_dispatch_algorithm, partial_logical_to_rank_dispatch_physical_map, "
        "partial_logical_to_all_physical_map, partial_logical_to_all_physical_map_num_valid, "
        "num_physical_experts, rank_invariant=",
    ),
    Symbol(
        TOPK,
        ROUTING_INPUTS,
        "*, layer_id, is_draft, num_token_non_padded=, expert_location_dispatch_info=",
    ),
)
"""Used by `eplb_policy` with dispatch `local`."""


def check_supported(environment: Mapping[str, str], symbols: Sequence[Symbol] = SYMBOLS) -> None:
    """Check that this SGLang is supported, with the symbols that are used.

    Raises `EngineUnsupported`: one error that names every problem, and the tested versions.
    """
    installed = RELEASE.installed()
    version = RELEASE.version_problem(installed, environment)
    problems = [] if version is None else [version]
    RELEASE.raise_unsupported(installed, [*problems, *symbol_problems(symbols)])
