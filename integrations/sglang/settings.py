"""Settings of the SGLang integration, from the environment.

EQUIPOISE_SGLANG='{"eplb_policy": {"dispatch": "local"}}'
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from equipoise.hal.errors import ConfigError
from equipoise.integrations.sglang.entry import SETTINGS_VARIABLE
from equipoise.integrations.vllm.settings import EplbPolicySettings, parse_feature

FEATURE = "eplb_policy"
VLLM_FEATURES = ("eplb", "pp_transport", "dp_load_balancer")
"""Features of the vLLM integration that are not for SGLang."""


class Dispatch(StrEnum):
    """How the rows of an expert are divided among its slots."""

    TABLES = "tables"
    """By the tables of SGLang's own dispatch, filled by the load."""
    LOCAL = "local"
    """By each rank for its own batch: `equipoise.integrations.sglang.local_dispatch`."""


@dataclass(frozen=True, kw_only=True)
class SglangPolicySettings(EplbPolicySettings):
    """Our placement policy in SGLang's EPLB.

    Attributes:
        target: as in the vLLM integration, but lower: a plan is made for several windows here, and
            has less noise to follow. What is worth a change is `min_gain`; the target says how far
            a change goes.
        dispatch: one of `Dispatch`.
    """

    target: float = 0.005
    dispatch: Dispatch = Dispatch.TABLES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dispatch not in tuple(Dispatch):
            raise ConfigError(f"dispatch must be {' or '.join(Dispatch)}, got {self.dispatch!r}")
        object.__setattr__(self, "dispatch", Dispatch(self.dispatch))


def policy_settings(text: str) -> SglangPolicySettings | None:
    """Parse the settings of `eplb_policy`; None if it is off.

    Raises `ConfigError` that names what is wrong.
    """
    try:
        features = json.loads(text)
        if features is None or features is False:
            return None
        _check_features(features)
        return parse_feature(FEATURE, SglangPolicySettings, features.get(FEATURE))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SETTINGS_VARIABLE} is no JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{SETTINGS_VARIABLE}: {error}") from None


def _check_features(features: object) -> None:
    """Raise `ConfigError` for a feature that is on and not for SGLang, or that there is not."""
    if not isinstance(features, Mapping):
        raise ConfigError(f"the settings must be an object of features, got {features!r}")
    for name in VLLM_FEATURES:
        if features.get(name) not in (None, False):
            raise ConfigError(f"{name} is not for SGLang, only {FEATURE} is")
    unknown = sorted(set(features) - {FEATURE, *VLLM_FEATURES})
    if unknown:
        raise ConfigError(f"unknown {', '.join(unknown)}; the only feature is {FEATURE}")
