"""Settings of the vLLM integration, from vLLM's `additional_config` or the environment.

    --additional-config
        '{"equipoise": {"eplb": true, "pp_transport": true, "dp_load_balancer": "fit"}}'

Each key is a feature. It is off if its key is absent, null or false; `true` switches it on with
defaults; an object has its options.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from equipoise.balancer.experts.config import PLANNER_LIMITS, ShareMode
from equipoise.byte_sizes import bytes_of_value
from equipoise.hal.errors import ConfigError
from equipoise.integrations.vllm.entry import SETTINGS_KEY, SETTINGS_VARIABLE

MAX_PORT = 65535

T = TypeVar("T")

COMMUNICATORS = {"cpu": ("gloo",), "cuda": ("nccl", "gloo"), "npu": ("hccl", "gloo")}
"""By device type, the default first. With gloo, tensors of a device are staged in host memory."""

SHARES = tuple(ShareMode)
COLLECTIVE_SHARES = (ShareMode.NODE, ShareMode.EXACT)
"""Share modes in which ranks communicate in every layer."""
MAX_IMBALANCE = 1000
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.1, 86_400.0
MAX_STEPS, MAX_LAYERS = 1 << 31, 4096
"""More is a typing error."""
MAX_QUEUE_TIMEOUT = 1e9
"""Bounds of options: values beyond them are typing errors, not wishes."""


@dataclass(frozen=True, kw_only=True)
class EplbPolicySettings:
    """Our placement policy, used by vLLM's own EPLB.

    Attributes:
        target: imbalance (max/mean - 1), mean over layers, below which nothing moves.
        min_gain: imbalance that a layer must gain to be changed.
        max_move_fraction: fraction of all slots that one call may change; the most imbalanced
            layers come first.
    """

    target: float = 0.02
    min_gain: float = 0.01
    max_move_fraction: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self, target=MAX_IMBALANCE, min_gain=MAX_IMBALANCE, max_move_fraction=1)
        if self.max_move_fraction == 0:
            raise ConfigError(
                "max_move_fraction 0 would move nothing: switch eplb_policy off instead"
            )


@dataclass(frozen=True, kw_only=True)
class EplbSettings:
    """Our balancer in place of vLLM's EPLB.

    Attributes:
        shares: how tokens are split among replicas: `static`, `lagged`, `local`, `node` or `exact`;
            None is `BalancerConfig`'s default.
        sub_window: steps of load summed at a time; None: about a quarter of the window.
        staging_bytes: bytes of device memory for weights in transfer, a number or a text such as
            "378MiB"; None: the size of a layer's slots. With less, one layer may take several
            rebalances.
        target: imbalance (max/mean - 1) below which nothing moves.
        min_gain: imbalance that a layer must gain to be changed.
        headroom: swaps in each layer that changes, so that shares have room to level single
            batches; for the shares `local`, `node` and `exact`.
        metrics_port: worker r serves Prometheus metrics on this port + r. Workers are counted by
            rank in the expert-parallel group, stage by stage. None: no metrics.
        metrics_address: address to serve them on; None: the loopback interface.
        max_stalled_steps: steps without progress after which a rebalance is aborted.
        timeout: bound of every wait.
        communicator: for weights and load sums: one of `COMMUNICATORS` for the device; None: the
            first of them.
        commit: how weights get into slots, a `CommitMode`: `staged` from peers, or `in_place` from
            a copy of all experts in the host's memory.
        layer_updates_per_iter: layers that are rewritten in a step, with `in_place`; None: 2.
    """

    shares: str | None = None
    sub_window: int | None = None
    staging_bytes: int | None = None
    target: float = 0.02
    min_gain: float = 0.01
    headroom: int = 8
    metrics_port: int | None = None
    metrics_address: str | None = None
    max_stalled_steps: int = 64
    timeout: float = 60.0
    communicator: str | None = None
    commit: str = "staged"
    layer_updates_per_iter: int | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, target=MAX_IMBALANCE, min_gain=MAX_IMBALANCE)
        most = PLANNER_LIMITS["headroom"]
        if type(self.headroom) is not int or not 0 <= self.headroom <= most:
            raise ConfigError(
                f"headroom must be a whole number from 0 to {most}, got {self.headroom!r}"
            )
        self._check_commit()
        if self.staging_bytes is not None:
            object.__setattr__(self, "staging_bytes", _byte_count(self.staging_bytes))
        _check_timeout(self.timeout)
        if self.shares is not None and self.shares not in SHARES:
            raise ConfigError(f"shares must be one of {', '.join(SHARES)}, got {self.shares!r}")
        if self.sub_window is not None and (
            type(self.sub_window) is not int or not 1 <= self.sub_window <= MAX_STEPS
        ):
            raise ConfigError(
                f"sub_window must be a whole number from 1 to {MAX_STEPS}, got {self.sub_window!r}"
            )
        port = self.metrics_port
        if port is not None and (type(port) is not int or not 1 <= port <= MAX_PORT):
            raise ConfigError(f"metrics_port must be 1 to {MAX_PORT}, got {port!r}")
        self._check_metrics_address()
        if type(self.max_stalled_steps) is not int or not 1 <= self.max_stalled_steps <= MAX_STEPS:
            raise ConfigError(
                f"max_stalled_steps must be a whole number from 1 to {MAX_STEPS}, "
                f"got {self.max_stalled_steps!r}"
            )
        communicators = list(
            dict.fromkeys(name for names in COMMUNICATORS.values() for name in names)
        )
        if self.communicator is not None and self.communicator not in communicators:
            raise ConfigError(
                f"communicator must be one of {', '.join(sorted(communicators))}, "
                f"got {self.communicator!r}"
            )

    def _check_metrics_address(self) -> None:
        address = self.metrics_address
        if address is None:
            return
        if not isinstance(address, str) or not address:
            raise ConfigError(f"metrics_address must be an address, got {address!r}")
        if self.metrics_port is None:
            raise ConfigError("metrics_address has no effect without metrics_port")

    def _check_commit(self) -> None:
        layers, in_place = self.layer_updates_per_iter, self.commit == "in_place"
        if self.commit not in ("staged", "in_place"):
            raise ConfigError(f"commit must be staged or in_place, got {self.commit!r}")
        if layers is not None and (type(layers) is not int or not 1 <= layers <= MAX_LAYERS):
            raise ConfigError(
                f"layer_updates_per_iter must be a whole number from 1 to {MAX_LAYERS}, "
                f"got {layers!r}"
            )
        if layers is not None and not in_place:
            raise ConfigError("layer_updates_per_iter is for commit in_place")
        if self.staging_bytes is not None and in_place:
            raise ConfigError("staging_bytes is for commit staged: in_place stages nothing")


@dataclass(frozen=True, kw_only=True)
class PpTransportSettings:
    """Our channel between pipeline stages.

    Attributes:
        timeout: bound of every wait.
    """

    timeout: float = 300.0

    def __post_init__(self) -> None:
        _check_timeout(self.timeout)


@dataclass(frozen=True, kw_only=True)
class DpLoadBalancerSettings:
    """Our routing of requests to data-parallel ranks.

    Attributes:
        policy: one of `equipoise route --help`.
        policy_options: of the policy, by name.
        queue_timeout: longest time that a request waits for a rank; then vLLM's own rule
            chooses one. With 0 it chooses for every request that the policy does not place at once.
        slots: requests that a rank runs at once; None: vLLM's `--max-num-seqs`.
        kv_tokens: tokens of a rank's KV cache that the policy may fill; None: what vLLM
            reports, or no limit with prefix caching, where prompts share tokens.
    """

    policy: str = "fit"
    policy_options: Mapping[str, Any] | None = None
    queue_timeout: float = 60.0
    slots: int | None = None
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError(f"policy is a name, got {self.policy!r}")
        if self.policy_options is not None and not isinstance(self.policy_options, Mapping):
            raise ConfigError(f"policy_options is an object, got {self.policy_options!r}")
        _check_numbers(self, queue_timeout=MAX_QUEUE_TIMEOUT)
        for name in ("slots", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number from 1, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of each feature; None is off."""

    eplb_policy: EplbPolicySettings | None = None
    eplb: EplbSettings | None = None
    pp_transport: PpTransportSettings | None = None
    dp_load_balancer: DpLoadBalancerSettings | None = None

    def __post_init__(self) -> None:
        if self.eplb_policy is not None and self.eplb is not None:
            raise ConfigError("eplb plans by itself: switch on `eplb_policy` or `eplb`")

    @property
    def enabled_features(self) -> tuple[str, ...]:
        """Names of the features that are on."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)


def parse_settings(additional: object, environment: Mapping[str, str]) -> Settings | None:
    """Parse the settings; None if no feature is on.

    Args:
        additional: vLLM's `additional_config`; anything but a mapping has no settings.
        environment: `EQUIPOISE_VLLM` is read if `additional` has no settings.

    Raises `ConfigError` that names the key of an invalid setting.
    """
    value = additional.get(SETTINGS_KEY) if isinstance(additional, Mapping) else None
    if value is None and SETTINGS_VARIABLE in environment:
        value = _parse_variable(environment[SETTINGS_VARIABLE])
    if value is None or value is False:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{SETTINGS_KEY} must be an object of features, got {value!r}")
    settings = _settings(value)
    return settings if settings.enabled_features else None


def is_variable_ignored(additional: object, environment: Mapping[str, str]) -> bool:
    """Whether `EQUIPOISE_VLLM` has other settings than `additional`, which come first."""
    value = additional.get(SETTINGS_KEY) if isinstance(additional, Mapping) else None
    text = environment.get(SETTINGS_VARIABLE, "")
    if value is None or not text.strip():
        return False
    try:
        return bool(_parse_variable(text) != value)
    except ConfigError:
        return True


def _parse_variable(text: str) -> object:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SETTINGS_VARIABLE} is no JSON: {error}") from None


def _settings(features: Mapping[str, object]) -> Settings:
    parsers: dict[str, Callable[[object], object]] = {
        "eplb_policy": lambda value: parse_feature("eplb_policy", EplbPolicySettings, value),
        "eplb": lambda value: parse_feature("eplb", EplbSettings, value),
        "pp_transport": lambda value: parse_feature("pp_transport", PpTransportSettings, value),
        "dp_load_balancer": lambda value: parse_feature(
            "dp_load_balancer", DpLoadBalancerSettings, _policy_by_name(value)
        ),
    }
    unknown = sorted(set(map(str, features)) - set(parsers))
    if unknown:
        raise ConfigError(
            f"{SETTINGS_KEY}: unknown {', '.join(unknown)}; features are {', '.join(parsers)}"
        )
    settings: dict[str, Any] = {name: parsers[name](value) for name, value in features.items()}
    return Settings(**settings)


def _policy_by_name(value: object) -> object:
    """Accept the name of a policy in place of an object."""
    return {"policy": value} if isinstance(value, str) else value


def parse_feature(name: str, kind: type[T], value: object) -> T | None:
    """Parse the value of a feature's key; None if the feature is off.

    Args:
        name: the key.
        kind: a dataclass of the feature's options.
        value: `true`, an object of options, or what stands for off.

    Raises `ConfigError` that names the key and what is wrong.
    """
    if value is None or value is False:
        return None
    if value is True:
        return kind()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{SETTINGS_KEY}.{name} must be true, false or an object, got {value!r}")
    option_names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(map(str, value)) - set(option_names))
    if unknown:
        raise ConfigError(
            f"{SETTINGS_KEY}.{name}: unknown {', '.join(unknown)}; "
            f"options are {', '.join(option_names)}"
        )
    try:
        return kind(**value)
    except ConfigError as error:
        raise ConfigError(f"{SETTINGS_KEY}.{name}: {error}") from None


def _byte_count(value: object) -> int:
    try:
        return bytes_of_value(value)
    except ValueError:
        raise ConfigError(
            f"staging_bytes must be whole bytes such as 396361728 or 378MiB, got {value!r}"
        ) from None


def _check_timeout(value: object) -> None:
    if not _is_number(value, MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS):
        raise ConfigError(
            f"timeout must be {MIN_TIMEOUT_SECONDS:g} to {MAX_TIMEOUT_SECONDS:g} seconds, "
            f"got {value!r}"
        )


def _check_numbers(settings: object, **bounds: float) -> None:
    """Check that the named settings are numbers from 0 to the bound. Raises `ConfigError`."""
    for name, end in bounds.items():
        value = getattr(settings, name)
        if not _is_number(value, 0, end):
            raise ConfigError(f"{name} must be a number from 0 to {end:g}, got {value!r}")


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
