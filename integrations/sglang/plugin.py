"""The SGLang plugin: hooks of the configured features, in SGLang's own registry."""

import json
import os
from collections.abc import Mapping
from functools import partial

from equipoise.hal.errors import ConfigError
from equipoise.integrations.sglang import compatibility, eplb_policy
from equipoise.integrations.sglang.entry import SETTINGS_VARIABLE
from equipoise.integrations.vllm.entry import SETTINGS_KEY
from equipoise.integrations.vllm.settings import EplbPolicySettings, parse_settings

FEATURE = "eplb_policy"
VLLM_FEATURES = ("eplb", "pp_transport", "dp_load_balancer")
"""Features of the vLLM integration that are not for SGLang."""
DEFAULT_TARGET = 0.005
"""Below that of the vLLM integration: a plan is made for several windows here, and has less noise
to follow. What is worth a change is `min_gain`; the target says how far a change goes."""


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
    compatibility.check_supported(os.environ)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        f"{compatibility.ARGUMENTS}.{compatibility.RESOLVE}",
        eplb_policy.check_arguments,
        HookType.AFTER,
    )
    manager = compatibility.MANAGER
    HookRegistry.register(
        f"{manager}.{compatibility.COMPUTE}",
        partial(eplb_policy.plan_from_installed, settings),
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{manager}.{compatibility.CHUNKS}", eplb_policy.only_changed_layers, HookType.AROUND
    )


def policy_settings(text: str) -> EplbPolicySettings | None:
    """Parse the settings of `eplb_policy`; None if it is off.

    Raises `ConfigError` that names what is wrong.
    """
    try:
        # The words and their checks are those of the vLLM integration.
        features = json.loads(text)
        _check_features(features)
        settings = parse_settings({SETTINGS_KEY: _with_defaults(features)}, {})
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SETTINGS_VARIABLE} is no JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{SETTINGS_VARIABLE}: {error}") from None
    return None if settings is None else settings.eplb_policy


def _check_features(features: object) -> None:
    """Raise `ConfigError` for a feature that is on and not for SGLang, or that there is not."""
    if isinstance(features, Mapping):
        for name in VLLM_FEATURES:
            if features.get(name) not in (None, False):
                raise ConfigError(f"{name} is not for SGLang, only {FEATURE} is")
        unknown = sorted(set(features) - {FEATURE, *VLLM_FEATURES})
        if unknown:
            raise ConfigError(f"unknown {', '.join(unknown)}; the only feature is {FEATURE}")


def _with_defaults(features: object) -> object:
    """Return the features with the default target, where `eplb_policy` is on without one."""
    options = features.get(FEATURE) if isinstance(features, Mapping) else None
    if options is True:
        options = {}
    if not isinstance(options, Mapping):
        return features
    assert isinstance(features, Mapping)
    return {**features, FEATURE: {"target": DEFAULT_TARGET, **options}}
