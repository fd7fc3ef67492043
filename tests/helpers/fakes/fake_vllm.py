"""An engine that has what the plugin hooks into, and nothing else; as modules, for one test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

CONFIGURATION = "vllm.engine.arg_utils"
WORKERS = "vllm.v1.worker.worker_base"


class EngineArgs:
    """Makes the configuration that it was given."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def create_engine_config(self, usage_context: object = None, headless: bool = False) -> Any:
        return self.config


class WorkerWrapperBase:
    """Holds a worker."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def init_device(self) -> None:
        self.worker.devices += 1


def configuration(additional: Any = None, **parallel: Any) -> SimpleNamespace:
    """As an engine has made it."""
    usual = {
        "worker_extension_cls": "",
        "enable_eplb": False,
        "enable_elastic_ep": False,
        "enable_fault_tolerance": False,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 1,
        "prefill_context_parallel_size": 1,
        "all2all_backend": "allgather_reducescatter",
        "distributed_executor_backend": "mp",
    }
    additional_config = {} if additional is None else additional
    return SimpleNamespace(
        additional_config=additional_config,
        parallel_config=SimpleNamespace(**{**usual, **parallel}),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=SimpleNamespace(enable_sleep_mode=False, runner_type="generate"),
        load_config=SimpleNamespace(load_format="auto"),
        weight_transfer_config=None,
        lora_config=None,
        use_v2_model_runner=True,
    )


@contextmanager
def engine(**modules: dict[str, Any]) -> Iterator[dict[str, ModuleType]]:
    """The engine's modules, importable within; `modules` by name, with `__` for a dot."""
    kinds: dict[str, dict[str, Any]] = {
        CONFIGURATION: {"EngineArgs": _fresh(EngineArgs)},
        WORKERS: {"WorkerWrapperBase": _fresh(WorkerWrapperBase)},
        **{name.replace("__", "."): attributes for name, attributes in modules.items()},
    }
    originals = {name: module for name, module in sys.modules.items() if _is_engine(name)}
    fake_modules = {name: _module(name, attributes) for name, attributes in kinds.items()}
    parents = {name.rsplit(".", depth)[0] for name in fake_modules for depth in range(1, 6)}
    try:
        for name in originals:
            del sys.modules[name]
        for name in sorted(parents):
            sys.modules.setdefault(name, _module(name, {"__path__": []}))
        sys.modules.update(fake_modules)
        yield fake_modules
    finally:
        for name in [name for name in sys.modules if _is_engine(name)]:
            del sys.modules[name]
        sys.modules.update(originals)


def _is_engine(name: str) -> bool:
    return name == "vllm" or name.startswith("vllm.")


def _module(name: str, attributes: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def _fresh(kind: type) -> type:
    """A class of its own: what is replaced in it is replaced in no other test."""
    return type(kind.__name__, (), dict(vars(kind)))
