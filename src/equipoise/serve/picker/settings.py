"""Settings of an endpoint picker: endpoints, ports, limits, timeouts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, unique
from pathlib import Path
from typing import TypeAlias

from equipoise.serve.settings import (
    MIB,
    HealthSettings,
    PolicyServerAddress,
    ReportSettings,
    WorkerSettings,
)


@unique
class TokenSource(StrEnum):
    """Where the policy's tokens come from."""

    CHUNKS = "chunks"
    """Counted in the chunks of answers, where Envoy sends them."""
    METRICS = "metrics"
    """Estimated from a counter of the worker's metrics; chunks are not looked at."""
    NONE = "none"
    """The policy knows prompts and ends only."""


@dataclass(frozen=True, kw_only=True)
class StaticEndpoints:
    """Endpoints that stay as they are."""

    workers: tuple[WorkerSettings, ...]


@dataclass(frozen=True, kw_only=True)
class EndpointsFile:
    """Endpoints in a file, which is read again when it changes.

    Attributes:
        path: of the file.
        read: reads it; raises UsageError where it cannot be taken.
        interval: seconds from one look to the next.
    """

    path: Path
    read: Callable[[Path], tuple[WorkerSettings, ...]]
    interval: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DnsEndpoints:
    """Endpoints of a name: each of its addresses, with each of the ports.

    Attributes:
        name: such as a headless service, which has the addresses of the ready pods.
        ports: of each address; one per data-parallel rank.
        slots: of each endpoint.
        kv_tokens: the same.
        interval: seconds from one look to the next, and for an answer.
    """

    name: str
    ports: tuple[int, ...]
    slots: int = 256
    kv_tokens: int | None = None
    interval: float = 5.0


EndpointSource: TypeAlias = StaticEndpoints | EndpointsFile | DnsEndpoints


@dataclass(frozen=True, kw_only=True)
class PickerPorts:
    """Where the picker listens; 0 picks a free port.

    Attributes:
        host: address.
        grpc: Envoy's; also gRPC health checks.
        health: gRPC health checks without TLS, as Kubernetes makes them.
        http: `/metrics`, `/health`, `/ready` and `/endpoints`.
        certificate: PEM, for the port of Envoy; None: no TLS.
        private_key: PEM.
    """

    host: str = "127.0.0.1"
    grpc: int = 9002
    health: int = 9003
    http: int = 9090
    certificate: Path | None = None
    private_key: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PickerLimits:
    """How much the picker takes; beyond it requests are refused.

    Attributes:
        queued: requests that no endpoint has yet (429).
        concurrency: requests at once, those under way included (429).
        body: bytes of a request's body, where Envoy sends it (413).
        buffered: bytes of all requests' bodies that are kept at once (429).
        fallbacks: endpoints that an answer names after the first.
    """

    queued: int = 1024
    concurrency: int = 16384
    body: int = 32 * MIB
    buffered: int = 1024 * MIB
    fallbacks: int = 2


@dataclass(frozen=True, kw_only=True)
class PickerTimeouts:
    """Seconds that are waited at most.

    Attributes:
        queue: for an endpoint with a free slot (503).
        drain: for the requests under way: of an endpoint that left the list, and of the picker once
            it is asked to end.
    """

    queue: float = 60.0
    drain: float = 30.0


@dataclass(frozen=True, kw_only=True)
class PickerSettings:
    """All settings of `equipoise picker`.

    Attributes:
        reports: what endpoints are asked for the policy; None: they are not asked.
        policy_server: what decides for several pickers; None: this one has a policy of its own.
        sheddable: objectives whose requests are refused (429) where they would have to wait.
        tokens: where tokens of answers are known from.
    """

    endpoints: EndpointSource
    ports: PickerPorts = field(default_factory=PickerPorts)
    limits: PickerLimits = field(default_factory=PickerLimits)
    timeouts: PickerTimeouts = field(default_factory=PickerTimeouts)
    health: HealthSettings = field(default_factory=HealthSettings)
    reports: ReportSettings | None = None
    policy_server: PolicyServerAddress | None = None
    sheddable: frozenset[str] = frozenset()
    tokens: TokenSource = TokenSource.CHUNKS
