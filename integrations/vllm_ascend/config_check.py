"""What is known before there is a worker: whether what is asked for can be had."""

import os
from collections.abc import Mapping
from typing import Any

from equipoise.integrations.vllm.plugin import non_eplb_config_errors, raise_config_errors
from equipoise.integrations.vllm.settings import Settings
from equipoise.integrations.vllm_ascend import compatibility


def prepare(config: Any, settings: Settings) -> None:
    """See that a worker made from `config` can switch the parts on.

    Raises:
        EngineUnsupported: these releases are not what was tested, or lack a place for a part.
        IntegrationError: a part makes no sense with this configuration.
    """
    compatibility.check_front_end(settings.enabled_features, os.environ)
    raise_config_errors(config_errors(config, settings))


def config_errors(config: Any, settings: Settings) -> list[str]:
    """What of the engine's configuration leaves a part nothing to do, or is beyond it."""
    wrong = non_eplb_config_errors(config, settings)
    if settings.eplb_policy is not None and not _balances(config):
        wrong.append(
            'eplb_policy needs "eplb_config": {"dynamic_eplb": true} in --additional-config, and '
            "DYNAMIC_EPLB=true in the environment"
        )
    if _section(config, "xlite_graph_config").get("enabled"):
        wrong.append("xlite_graph_config asks for another worker than the one that is extended")
    return wrong


def _balances(config: Any) -> bool:
    """Whether experts are moved at all: by vllm-ascend, or in later releases by vLLM."""
    own = _section(config, "eplb_config")
    recorded = own.get("expert_map_record_path") is not None
    return bool(own.get("dynamic_eplb") or recorded or config.parallel_config.enable_eplb)


def _section(config: Any, name: str) -> Mapping[str, Any]:
    additional = config.additional_config
    found = additional.get(name) if isinstance(additional, Mapping) else None
    return found if isinstance(found, Mapping) else {}
