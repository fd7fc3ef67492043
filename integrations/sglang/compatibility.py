"""Supported releases of SGLang, and every symbol that the plugin uses, with its signature."""

from collections.abc import Mapping

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
ARGUMENTS = "sglang.srt.arg_groups.parallel_hook"
RESOLVE = "handle_eplb_and_dispatch"
COMPUTE = "EPLBManager._compute_expert_location_metadata"
CHUNKS = "EPLBManager._compute_update_layer_ids_chunks"
SYMBOLS = (
    Symbol(REGISTRY, "HookRegistry.register", "target, hook, hook_type=, *, source="),
    Symbol(REGISTRY, "HookType.AROUND", ANY_SIGNATURE),
    Symbol(REGISTRY, "HookType.AFTER", ANY_SIGNATURE),
    Symbol(ARGUMENTS, RESOLVE, "server_args"),
    Symbol("sglang.srt.arg_groups.overrides", "resolving_view", ANY_SIGNATURE),
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


def check_supported(environment: Mapping[str, str]) -> None:
    """Check that this SGLang is supported.

    Raises `EngineUnsupported`: one error that names every problem, and the tested versions.
    """
    installed = RELEASE.installed()
    version = RELEASE.version_problem(installed, environment)
    problems = [] if version is None else [version]
    RELEASE.raise_unsupported(installed, [*problems, *symbol_problems(SYMBOLS)])
