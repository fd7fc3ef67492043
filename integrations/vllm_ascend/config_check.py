"""Checks of the configuration before there is a worker."""

import os
from collections.abc import Mapping
from typing import Any

from equipoise.integrations.vllm.plugin import non_eplb_config_errors, raise_config_errors
from equipoise.integrations.vllm.settings import Settings
from equipoise.integrations.vllm_ascend import compatibility

FLASHCOMM_VARIABLE = "VLLM_ASCEND_ENABLE_FLASHCOMM1"
"""vllm-ascend's older switch for what `enable_flashcomm1` switches."""


def prepare(config: Any, settings: Settings) -> None:
    """Check that a worker created from `config` can switch the features on.

    Raises:
        EngineUnsupported: a release is untested, or lacks a symbol that a feature uses.
        IntegrationError: a feature cannot work with this configuration.
    """
    compatibility.check_front_end(settings.enabled_features, os.environ)
    raise_config_errors(config_errors(config, settings))


def config_errors(config: Any, settings: Settings) -> list[str]:
    """List why features cannot work with this configuration, or would have no effect."""
    errors = non_eplb_config_errors(config, settings)
    if settings.eplb_policy is not None and not _balances(config):
        errors.append(
            'eplb_policy needs "eplb_config": {"dynamic_eplb": true} in --additional-config, and '
            "DYNAMIC_EPLB=true in the environment"
        )
    if settings.pp_transport is not None:
        errors += _pp_transport_errors(config)
    if _section(config, "xlite_graph_config").get("enabled"):
        errors.append("xlite_graph_config selects another worker than the one that is extended")
    return errors


def _pp_transport_errors(config: Any) -> list[str]:
    errors, additional = [], config.additional_config
    by_variable = os.environ.get(FLASHCOMM_VARIABLE, "0") not in ("", "0")
    by_key = isinstance(additional, Mapping) and additional.get("enable_flashcomm1")
    if by_variable or by_key:
        errors.append(
            "pp_transport needs all rows of a step on every rank, and enable_flashcomm1 divides "
            "them"
        )
    speculative = getattr(config, "speculative_config", None)
    if getattr(speculative, "method", None) == "eagle3":
        errors.append(
            "pp_transport sends what the next stage's model announces, and vllm-ascend adds hidden "
            "states for eagle3 to it"
        )
    return errors


def _balances(config: Any) -> bool:
    """Whether expert balancing is on: in vllm-ascend, or in later releases in vLLM."""
    own = _section(config, "eplb_config")
    recorded = own.get("expert_map_record_path") is not None
    return bool(own.get("dynamic_eplb") or recorded or config.parallel_config.enable_eplb)


def _section(config: Any, name: str) -> Mapping[str, Any]:
    additional = config.additional_config
    section = additional.get(name) if isinstance(additional, Mapping) else None
    return section if isinstance(section, Mapping) else {}
