"""Entry point of the vLLM plugin: one hook, which imports the rest when a feature is configured.

vLLM runs `register` in every process of every engine, before there is a configuration. So until a
configuration mentions equipoise, nothing else of this package is imported and nothing else of vLLM
is replaced.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import unwrap
from typing import Any

LOG = logging.getLogger("vllm.equipoise")
"""A child of vLLM's logger, whose format and level it inherits."""
PLUGIN = "equipoise.integrations.vllm.plugin"
SETTINGS_KEY = "equipoise"
"""Key of our settings in vLLM's `additional_config`."""
SETTINGS_VARIABLE = "EQUIPOISE_VLLM"
"""Environment variable with the same settings as JSON."""
CONFIG_MODULE = "vllm.engine.arg_utils"
WORKER_MODULE = "vllm.v1.worker.worker_base"
INIT_HOOK = "init_worker_extension"
"""Method of a worker extension, for when the worker has its device, but no model yet."""
ORIGINAL_ATTRIBUTE = "__equipoise_replaces__"
"""Attribute of a replacement that holds the original."""


def register() -> None:
    """Hook the creation of configurations. Calling it again does nothing.

    Raises:
        ImportError, AttributeError: this vLLM has no such place, and the environment or the command
            line mention equipoise; otherwise that is logged.
    """
    try:
        engine_args = import_module(CONFIG_MODULE).EngineArgs
        create = engine_args.create_engine_config
    except (ImportError, AttributeError) as error:
        if is_requested():
            raise
        LOG.warning("equipoise finds no place in this vLLM, and stays switched off: %s", error)
        return
    if not hasattr(create, ORIGINAL_ATTRIBUTE):
        engine_args.create_engine_config = _hook_config(create)
    if WORKER_MODULE in sys.modules:  # a worker's process, which does not create configurations
        hook_worker()


def is_requested() -> bool:
    """Whether the environment or the command line mention equipoise."""
    return SETTINGS_VARIABLE in os.environ or any(
        SETTINGS_KEY in argument for argument in sys.argv[1:]
    )


def _hook_config(create: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        additional = config.additional_config
        if SETTINGS_VARIABLE in os.environ or (
            isinstance(additional, Mapping) and SETTINGS_KEY in additional
        ):
            import_module(PLUGIN).switch_on(config)
        elif PLUGIN in sys.modules:  # an engine before this one had features
            sys.modules[PLUGIN].switch_off()
        return config

    setattr(create_engine_config, ORIGINAL_ATTRIBUTE, create)
    return create_engine_config


def hook_worker() -> None:
    """Let a worker call its extension when it has its device, as vLLM does by itself since 0.33."""
    wrapper = import_module(WORKER_MODULE).WorkerWrapperBase
    init = wrapper.init_device
    if not hasattr(init, ORIGINAL_ATTRIBUTE) and INIT_HOOK not in unwrap(init).__code__.co_consts:
        wrapper.init_device = _hook_init(init)


def _hook_init(init: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(init)
    def init_device(self: Any) -> None:
        init(self)
        extend = getattr(self.worker, INIT_HOOK, None)
        if extend is not None:
            extend()

    setattr(init_device, ORIGINAL_ATTRIBUTE, init)
    return init_device
