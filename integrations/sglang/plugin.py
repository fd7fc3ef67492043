"""The SGLang plugin: hooks of the configured features, in SGLang's own registry."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from equipoise.integrations.sglang import compatibility, eplb_policy, local_dispatch
from equipoise.integrations.sglang.settings import Dispatch, policy_settings


def install(text: str) -> None:
    """Register the hooks; SGLang applies them when all plugins have run.

    Args:
        text: JSON, a feature by key.

    Raises:
        ConfigError: the settings are invalid, or name a feature that is not for SGLang.
        EngineUnsupported: this SGLang was not tested, or lacks a symbol.
    """
    settings = policy_settings(text)
    if settings is None:
        return
    is_local = settings.dispatch is Dispatch.LOCAL
    symbols = compatibility.LOCAL_DISPATCH_SYMBOLS if is_local else ()
    compatibility.check_supported(os.environ, [*compatibility.SYMBOLS, *symbols])
    resolve = partial(eplb_policy.resolve_arguments, settings)
    plan = partial(eplb_policy.plan_from_installed, settings)
    _around(compatibility.ARGUMENTS, compatibility.RESOLVE, resolve)
    _around(compatibility.MANAGER, compatibility.COMPUTE, plan)
    _around(compatibility.MANAGER, compatibility.CHUNKS, eplb_policy.only_changed_layers)
    if is_local:
        _around(compatibility.LOCATION, compatibility.SET_METADATA, local_dispatch.follow_metadata)
        _around(compatibility.LOCATION, compatibility.UPDATE, local_dispatch.follow_update)
        _around(compatibility.TOPK, compatibility.ROUTING_INPUTS, local_dispatch.mark_batch)
        _around(compatibility.DISPATCH, compatibility.MAP, local_dispatch.map_to_slots)


def _around(module: str, name: str, hook: Callable[..., Any]) -> None:
    """Have SGLang call a hook in place of its function, which the hook gets first."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{module}.{name}", hook, HookType.AROUND)
