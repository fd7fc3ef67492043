"""What a user asks of the integration: read from vLLM's `additional_config`, or the environment.

    --additional-config '{"equipoise": {"engine": true, "handover": true, "routing": "fit"}}'

Each key is a part. A part is off if its key is absent, null or false; `true` switches it on as it
comes; anything else are its options.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from equipoise.hal.errors import ConfigError

SETTINGS_KEY = "equipoise"
"""In `additional_config`."""
SETTINGS_VARIABLE = "EQUIPOISE_VLLM"
"""In the environment: the same object as JSON, where the command line cannot be changed."""

MAX_PORT = 65535

T = TypeVar("T")

COMMUNICATORS = {"cpu": ("gloo",), "cuda": ("nccl", "gloo"), "npu": ("hccl", "gloo")}
"""By type of the engine's device, the default first. On a device gloo goes through the host."""

MAX_IMBALANCE = 1000
MAX_MIB = 1 << 20
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.1, 86_400.0
MAX_QUEUE_SECONDS = 1e9
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class EplbPolicySettings:
    """Our placement policy, in the engine's own balancer.

    Attributes:
        target: imbalance (max/mean - 1), mean over layers, that is good enough.
        gain: imbalance that a layer must gain to be touched.
        most: part of all slots that one call may change; the most uneven layers come first.
    """

    target_imbalance: float = 0.02
    min_improvement: float = 0.01
    max_move_fraction: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(
            self, target_imbalance=MAX_IMBALANCE, min_improvement=MAX_IMBALANCE, max_move_fraction=1
        )


@dataclass(frozen=True, kw_only=True)
class EplbSettings:
    """Our engine as the engine's balancer.

    Attributes:
        shares: `static`, `lagged` or `exact`.
        sub_window: steps summed at a time; None: about a quarter of the window.
        staging_mib: MiB of a device for weights that are on their way; None: as much as the slots
            of a layer take. With less, what a layer needs may take several rebalances.
        target: imbalance (max/mean - 1) that is good enough.
        gain: imbalance that a layer must gain to be touched.
        metrics_port: worker r answers Prometheus on this port + r, on the loopback interface: by
            rank in the expert-parallel group, stage by stage; None: nobody does.
        deadline: seconds that any wait may last.
        communicator: carries weights and sums of load: one of `COMMUNICATORS` for the device; None:
            the first of them.
    """

    replica_split: str = "lagged"
    sub_window: int | None = None
    staging_mib: float | None = None
    target_imbalance: float = 0.02
    min_improvement: float = 0.01
    metrics_port: int | None = None
    timeout_seconds: float = 60.0
    communicator: str | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, target_imbalance=MAX_IMBALANCE, min_improvement=MAX_IMBALANCE)
        if self.staging_mib is not None:
            _check_numbers(self, staging_mib=MAX_MIB)
        _check_timeout(self.timeout_seconds)
        if self.replica_split not in ("static", "lagged", "exact"):
            raise ConfigError(
                f"replica_split must be static, lagged or exact, got {self.replica_split!r}"
            )
        if self.sub_window is not None and (
            type(self.sub_window) is not int or self.sub_window < 1
        ):
            raise ConfigError(f"sub_window must be a whole number from 1, got {self.sub_window!r}")
        port = self.metrics_port
        if port is not None and (type(port) is not int or not 1 <= port <= MAX_PORT):
            raise ConfigError(f"metrics_port must be 1 to {MAX_PORT}, got {port!r}")
        known = list(dict.fromkeys(name for names in COMMUNICATORS.values() for name in names))
        if self.communicator is not None and self.communicator not in known:
            raise ConfigError(
                f"communicator must be one of {', '.join(sorted(known))}, got {self.communicator!r}"
            )


@dataclass(frozen=True, kw_only=True)
class PpTransportSettings:
    """Our channel between pipeline stages.

    Attributes:
        deadline: seconds that any wait may last.
    """

    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        _check_timeout(self.timeout_seconds)


@dataclass(frozen=True, kw_only=True)
class DpLoadBalancerSettings:
    """Our routing of requests to data-parallel ranks.

    Attributes:
        policy: one of `equipoise route --help`.
        options: of the policy, by name.
        max_queue_seconds: a request waits for a rank no longer; then the engine's own rule chooses.
        slots: requests that a rank has at once; None: the engine's `--max-num-seqs`.
        room: tokens in a rank's KV cache, as far as the policy is to keep to it; None: what the
            engine says, or no limit where it keeps prefixes, which prompts share.
    """

    policy: str = "fit"
    options: Mapping[str, Any] | None = None
    max_queue_seconds: float = 60.0
    max_running: int | None = None
    kv_token_capacity: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            raise ConfigError(f"policy is a name, got {self.policy!r}")
        if self.options is not None and not isinstance(self.options, Mapping):
            raise ConfigError(f"options is an object, got {self.options!r}")
        _check_numbers(self, max_queue_seconds=MAX_QUEUE_SECONDS)
        for name in ("max_running", "kv_token_capacity"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number from 1, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The parts that are on; None is off."""

    eplb_policy: EplbPolicySettings | None = None
    eplb: EplbSettings | None = None
    pp_transport: PpTransportSettings | None = None
    dp_load_balancer: DpLoadBalancerSettings | None = None

    def __post_init__(self) -> None:
        if self.eplb_policy is not None and self.eplb is not None:
            raise ConfigError("eplb plans by itself: switch on `eplb_policy` or `eplb`")

    @property
    def enabled_features(self) -> tuple[str, ...]:
        """Names of those that are on."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)


def parse_settings(additional: object, environment: Mapping[str, str]) -> Settings | None:
    """What is asked for; None if nothing is.

    Args:
        additional: vLLM's `additional_config`; what is not a mapping asks for nothing.
        environment: `EQUIPOISE_VLLM` counts where `additional` says nothing.

    Raises `ConfigError` for what is not understood, naming the key.
    """
    given = additional.get(SETTINGS_KEY) if isinstance(additional, Mapping) else None
    if given is None and SETTINGS_VARIABLE in environment:
        given = _parse_variable(environment[SETTINGS_VARIABLE])
    if given is None or given is False:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{SETTINGS_KEY} must be an object of parts, got {given!r}")
    settings = _settings(given)
    return settings if settings.enabled_features else None


def _parse_variable(text: str) -> object:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{SETTINGS_VARIABLE} is no JSON: {error}") from None


def _settings(given: Mapping[str, object]) -> Settings:
    kinds: dict[str, Callable[[object], object]] = {
        "eplb_policy": lambda value: _part("eplb_policy", EplbPolicySettings, value),
        "eplb": lambda value: _part("eplb", EplbSettings, value),
        "pp_transport": lambda value: _part("pp_transport", PpTransportSettings, value),
        "dp_load_balancer": lambda value: _part(
            "dp_load_balancer", DpLoadBalancerSettings, _named(value)
        ),
    }
    unknown = sorted(set(map(str, given)) - set(kinds))
    if unknown:
        raise ConfigError(
            f"{SETTINGS_KEY}: unknown {', '.join(unknown)}; parts are {', '.join(kinds)}"
        )
    parts: dict[str, Any] = {name: kinds[name](value) for name, value in given.items()}
    return Settings(**parts)


def _named(value: object) -> object:
    """A routing policy may be given by its name alone."""
    return {"policy": value} if isinstance(value, str) else value


def _part(name: str, kind: type[T], value: object) -> T | None:
    if value is None or value is False:
        return None
    if value is True:
        return kind()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{SETTINGS_KEY}.{name} must be true, false or an object, got {value!r}")
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(map(str, value)) - set(known))
    if unknown:
        raise ConfigError(
            f"{SETTINGS_KEY}.{name}: unknown {', '.join(unknown)}; options are {', '.join(known)}"
        )
    try:
        return kind(**value)
    except ConfigError as error:
        raise ConfigError(f"{SETTINGS_KEY}.{name}: {error}") from None


def _check_timeout(value: object) -> None:
    if not _is_number(value, MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS):
        raise ConfigError(
            f"timeout_seconds must be {MIN_TIMEOUT_SECONDS:g} to {MAX_TIMEOUT_SECONDS:g} seconds, got {value!r}"
        )


def _check_numbers(settings: object, **most: float) -> None:
    """Numbers from 0 to the most that makes sense, by name."""
    for name, end in most.items():
        value = getattr(settings, name)
        if not _is_number(value, 0, end):
            raise ConfigError(f"{name} must be a number from 0 to {end:g}, got {value!r}")


def _is_number(value: object, least: float, most: float) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )
