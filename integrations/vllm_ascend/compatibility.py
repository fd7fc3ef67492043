"""Which release of vllm-ascend was tested, with which vLLM, and what each part touches of them."""

from collections.abc import Iterable, Mapping
from importlib import import_module

from equipoise.integrations.vllm import compatibility as vllm
from equipoise.integrations.vllm.compatibility import Release, Symbol, symbol_problems

RELEASE = Release(
    "vllm-ascend",
    ("vllm-ascend",),
    ("0.23.0",),
    accept_variable="EQUIPOISE_VLLM_ASCEND_ACCEPT_VERSION",
)
VLLM_RELEASE = Release(
    "vLLM", vllm.DISTRIBUTIONS, ("0.23.0",), accept_variable=vllm.ACCEPT_VERSION_VARIABLE
)
"""The vLLM that the release is made for."""

WORKER = "vllm_ascend.worker.worker"
GROUPS = "vllm_ascend.patch.worker.patch_distributed"
POLICIES = "vllm_ascend.eplb.core.policy"
PLANNER = "vllm_ascend.eplb.core.eplb_worker"

WORKER_SYMBOLS = (
    Symbol(
        WORKER,
        "NPUWorker.__init__",
        "self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=, **kwargs",
    ),
    Symbol(WORKER, "NPUWorker.init_device", "self"),
    Symbol(WORKER, "NPUWorker.shutdown", "self"),
)
"""What the worker's class needs."""
STAGES = "all_gather_group=, all_gather_tensors="
FEATURE_SYMBOLS = {
    "eplb_policy": (
        Symbol(f"{POLICIES}.policy_factory", "PolicyFactory.generate_policy", "policy_type"),
        Symbol(
            f"{POLICIES}.policy_abstract",
            "EplbPolicy.rebalance_experts",
            "self, current_expert_table, expert_workload",
        ),
        Symbol(PLANNER, "EplbWorker.calculate_rebalance_experts", "self, load_info, old_placement"),
        Symbol(PLANNER, "EplbWorker.check_expert_placement", "self, old_placement, new_placement"),
        *vllm.FEATURE_SYMBOLS["eplb_policy"],
    ),
    "pp_transport": (
        Symbol(WORKER, "NPUWorker.execute_model", "self, scheduler_output"),
        Symbol(
            GROUPS,
            "GroupCoordinatorPatch.isend_tensor_dict",
            f"self, tensor_dict, dst=, {STAGES}",
        ),
        Symbol(GROUPS, "GroupCoordinatorPatch.irecv_tensor_dict", f"self, src=, {STAGES}"),
        Symbol(vllm.GROUPS, "get_world_group", ""),
        *vllm.FEATURE_SYMBOLS["pp_transport"],
    ),
}
"""What each part touches in a worker."""
FRONT_END_SYMBOLS = {
    "dp_load_balancer": (
        Symbol(vllm.CLIENT, vllm.CLIENT_INIT, vllm.CLIENT_INIT_PARAMETERS),
        *vllm.CLIENT_SYMBOLS,
    )
}
"""What a part touches in the front end, which is vLLM's."""
UNSUPPORTED_FEATURES = {
    "eplb": (
        "vllm-ascend moves experts by itself, not by vLLM's EPLB classes, in whose place our "
        "engine stands; `eplb_policy` plans for it"
    ),
}
"""Parts that no release that was tested has a place for."""


def check_front_end(parts: Iterable[str], environment: Mapping[str, str]) -> None:
    """See, in a process that has no device, that `parts` can be switched on.

    Nothing of vllm-ascend is imported.

    Args:
        parts: keys of `PARTS`, `FRONT_END_SYMBOLS` or `REFUSED`.
        environment: may name versions to take although they were not tested.

    Raises:
        EngineUnsupported: one error that names everything that is not as it must be, and the
            versions tested.
    """
    wanted = tuple(parts)
    symbols = [symbol for part in wanted for symbol in FRONT_END_SYMBOLS.get(part, ())]
    wrong = [*_of_versions(environment), *_refused(wanted), *symbol_problems(symbols)]
    RELEASE.raise_unsupported(RELEASE.installed(), wrong)


def check_worker(parts: Iterable[str], environment: Mapping[str, str]) -> None:
    """The same in a worker's process, of what is touched there."""
    wanted = tuple(parts)
    symbols = [
        *WORKER_SYMBOLS,
        *(symbol for part in wanted for symbol in FEATURE_SYMBOLS.get(part, ())),
    ]
    wrong = [*_of_versions(environment), *_refused(wanted), *_of_build(), *symbol_problems(symbols)]
    RELEASE.raise_unsupported(RELEASE.installed(), wrong)


def _of_versions(environment: Mapping[str, str]) -> list[str]:
    ours, beside = (
        each.version_problem(each.installed(), environment) for each in (RELEASE, VLLM_RELEASE)
    )
    wrong = [] if ours is None else [ours]
    return wrong if beside is None else [*wrong, f"its vLLM: {beside}"]


def _refused(parts: Iterable[str]) -> list[str]:
    return [
        f"{part}: {UNSUPPORTED_FEATURES[part]}" for part in parts if part in UNSUPPORTED_FEATURES
    ]


def _of_build() -> list[str]:
    """Each build is for one family of devices, and this one has a worker of its own."""
    try:
        built_for = import_module("vllm_ascend._build_info").__device_type__
    except (ImportError, AttributeError) as error:
        return [f"vllm_ascend._build_info:__device_type__ is missing: {error}"]
    return [f"it is built for {built_for}, which has another worker"] if "310P" in built_for else []
