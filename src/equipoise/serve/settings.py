"""Settings of a proxy: workers, limits, timeouts, health checks, access."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique
from hashlib import sha256
from pathlib import Path

RANK_HEADER = "X-data-parallel-rank"
"""Header by which engines take the data-parallel rank of a request."""
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One worker: a server, or one data-parallel rank of a server that several workers share.

    Attributes:
        url: of the server, without a trailing slash.
        name: in logs and metrics; unique.
        slots: requests that it has at once.
        kv_tokens: tokens in its KV cache; None: unknown, as many as come.
        headers: sent with every request that is bound to it.
    """

    url: str
    name: str
    slots: int = 256
    kv_tokens: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes it the same worker at several front ends; no header can be read from it."""
        if not self.headers:
            return self.url
        headers = sorted((name.lower(), value) for name, value in self.headers.items())
        return f"{self.url}#{sha256(repr(headers).encode()).hexdigest()[:8]}"

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that its headers name; None: they name none."""
        for name, value in self.headers.items():
            if name.lower() == RANK_HEADER.lower() and value.isascii() and value.isdigit():
                return int(value)
        return None


@dataclass(frozen=True)
class PolicyServerAddress:
    """Where the policy is that several front ends share."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much the proxy takes; beyond it requests are refused, by the status in parentheses.

    Attributes:
        body: bytes of one request (413).
        header: bytes of a request's head (431).
        buffered: bytes of all requests' bodies that are kept at once (429).
        answer: bytes of an answer that is not streamed (502).
        concurrency: requests in the proxy at once (429).
        queued: requests that no worker has yet (429).
        connections: of clients; further ones are closed.
        attempts: times that one request is sent to a worker.
    """

    body: int = 32 * MIB
    header: int = 32 << 10
    buffered: int = 1024 * MIB
    answer: int = 64 * MIB
    concurrency: int = 8192
    queued: int = 1024
    connections: int = 16384
    attempts: int = 3


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that are waited at most; the outcome in parentheses.

    Attributes:
        connect: for a worker to take the connection (another worker).
        first_token: for the first token of a stream (504).
        token: from one token of a stream to the next, and for a client to take it.
        total: from a request's arrival to its end.
        queue: for a worker with a free slot (503).
        header: for the head of a request (408).
        body: for the body of a request (408).
        idle: for the next request of a connection.
        drain: for the requests under way, once the proxy is asked to end.
        heartbeat: after which a stream to which nothing was sent gets a comment; 0: none.
    """

    connect: float = 5.0
    first_token: float = 600.0
    token: float = 120.0
    total: float = 3600.0
    queue: float = 60.0
    header: float = 10.0
    body: float = 60.0
    idle: float = 75.0
    drain: float = 30.0
    heartbeat: float = 15.0


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """When a worker is believed to be well, or not.

    Attributes:
        interval: seconds from one question to the next; while in doubt, a tenth of it.
        timeout: seconds for an answer.
        draining_after: questions without a good answer, after which it gets no more requests.
        lost_after: questions without any answer, after which what it had is given up.
        serving_after: good answers in a row, after which it gets requests again.
    """

    interval: float = 2.0
    timeout: float = 2.0
    draining_after: int = 1
    lost_after: int = 3
    serving_after: int = 2


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Names of the Prometheus metrics that workers report load by, and how often they are read.

    Attributes:
        waiting: requests that a worker has not admitted.
        running: requests that it has.
        kv_usage: the part of its KV cache that is taken, 0 to 1; None: tokens / kv_tokens.
        tokens: in its KV cache; None: kv_usage x kv_tokens.
        generated: counter of the tokens that it has made; None: tokens are counted in answers. Read
            by the endpoint picker only.
        rank_label: label that distinguishes several ranks on one page.
        path: of the page.
        interval: seconds from an answer to the next question.
        timeout: seconds for an answer.
    """

    waiting: str
    running: str
    kv_usage: str | None = None
    tokens: str | None = None
    generated: str | None = None
    rank_label: str | None = None
    path: str = "/metrics"
    interval: float = 0.5
    timeout: float = 2.0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are asked for."""
        metrics = (self.waiting, self.running, self.kv_usage, self.tokens, self.generated)
        return tuple(name for name in metrics if name is not None)


@unique
class ClientRank(StrEnum):
    """What becomes of a client's wish for one data-parallel rank."""

    HONOUR = "honour"
    """It goes to that worker, and before requests that may go anywhere."""
    FORBID = "forbid"


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """Who may ask, and where.

    Attributes:
        host: address to listen on.
        port: 0 picks a free one.
        keys: any of them admits; none: everybody is admitted.
        worker_key: sent to workers instead of the client's.
        certificate: PEM; None: no TLS.
        private_key: PEM; None: it is in the file of the certificate.
        allowed_origins: of web pages that browsers let ask; `*`: of all.
    """

    host: str = "127.0.0.1"
    port: int = 9000
    keys: tuple[str, ...] = ()
    worker_key: str | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    allowed_origins: tuple[str, ...] = ("*",)


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """All settings of `equipoise route`.

    Attributes:
        reports: what workers are asked for the policy; None: they are not asked.
        policy_server: what decides for several proxies; None: this one has a policy of its own.
        log: JSON lines, one a request; None: none are written.
        wandb: project at Weights & Biases; None: none.
    """

    workers: tuple[WorkerSettings, ...]
    access: AccessSettings = field(default_factory=AccessSettings)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    health: HealthSettings = field(default_factory=HealthSettings)
    client_rank: ClientRank = ClientRank.FORBID
    reports: ReportSettings | None = None
    policy_server: PolicyServerAddress | None = None
    log: Path | None = None
    wandb: str | None = None
