"""Supported releases of vllm-ascend and its vLLM, and the symbols that each feature uses."""

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
"""The vLLM that this release requires."""

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
"""Symbols that our worker class uses."""
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
        Symbol(WORKER, "NPUWorker.get_model", "self"),
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
"""Symbols that each feature uses in a worker."""
FRONT_END_SYMBOLS = {
    "dp_load_balancer": (
        Symbol(vllm.CLIENT, vllm.CLIENT_INIT, vllm.CLIENT_INIT_PARAMETERS),
        *vllm.CLIENT_SYMBOLS,
    )
}
"""Symbols that a feature uses in the front end, which is vLLM's."""
UNSUPPORTED_FEATURES = {
    "eplb": (
        "vllm-ascend moves experts by itself, not by vLLM's EPLB classes, which eplb replaces; "
        "use `eplb_policy`"
    ),
}
"""Features that no tested release supports, and why."""


def check_front_end(features: Iterable[str], environment: Mapping[str, str]) -> None:
    """Check, in a process without a device, that features are supported.

    Does not import vllm-ascend.

    Args:
        features: keys of `FEATURE_SYMBOLS`, `FRONT_END_SYMBOLS` or `UNSUPPORTED_FEATURES`.
        environment: may accept untested versions.

    Raises:
        EngineUnsupported: one error that names every problem, and the tested versions.
    """
    names = tuple(features)
    symbols = [symbol for name in names for symbol in FRONT_END_SYMBOLS.get(name, ())]
    problems = [*_version_problems(environment), *_unsupported(names), *symbol_problems(symbols)]
    RELEASE.raise_unsupported(RELEASE.installed(), problems)


def check_worker(features: Iterable[str], environment: Mapping[str, str]) -> None:
    """The same in a worker's process, for the symbols used there."""
    names = tuple(features)
    symbols = [
        *WORKER_SYMBOLS,
        *(symbol for name in names for symbol in FEATURE_SYMBOLS.get(name, ())),
    ]
    problems = [
        *_version_problems(environment),
        *_unsupported(names),
        *_build_problems(),
        *symbol_problems(symbols),
    ]
    RELEASE.raise_unsupported(RELEASE.installed(), problems)


def _version_problems(environment: Mapping[str, str]) -> list[str]:
    own_problem, vllm_problem = (
        each.version_problem(each.installed(), environment) for each in (RELEASE, VLLM_RELEASE)
    )
    problems = [] if own_problem is None else [own_problem]
    return problems if vllm_problem is None else [*problems, f"its vLLM: {vllm_problem}"]


def _unsupported(features: Iterable[str]) -> list[str]:
    return [
        f"{name}: {UNSUPPORTED_FEATURES[name]}" for name in features if name in UNSUPPORTED_FEATURES
    ]


def _build_problems() -> list[str]:
    """Refuse builds for the 310P family, which has another worker."""
    try:
        built_for = import_module("vllm_ascend._build_info").__device_type__
    except (ImportError, AttributeError) as error:
        return [f"vllm_ascend._build_info:__device_type__ is missing: {error}"]
    return [f"it is built for {built_for}, which has another worker"] if "310P" in built_for else []
