"""The options of `equipoise route`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.cli import kinds
from equipoise.cli.options import Option
from equipoise.serve.settings import Access, ClientRank, HealthSettings, Limits, Patience

WHERE, WORKERS, WAITS = "listening", "workers", "waits"
LIMITS, HEALTH, WATCHING = "limits", "health of workers", "watching"
_ACCESS, _LIMITS, _PATIENCE, _HEALTH = Access(), Limits(), Patience(), HealthSettings()


def _wait(key: str, default: float, what: str) -> Option:
    return Option(key=f"{key}_timeout", kind=kinds.SECONDS, group=WAITS, metavar="SECONDS",
                  shown_default=f"{default:g}", help=what)  # fmt: skip


def _bytes(key: str, default: int, what: str) -> Option:
    shown = f"{default >> 20}MiB" if default >= 1 << 20 else f"{default >> 10}KiB"
    return Option(key=key, kind=kinds.BYTES, group=LIMITS, metavar="SIZE", shown_default=shown,
                  help=what)  # fmt: skip


def _count(key: str, default: int, group: str, what: str) -> Option:
    return Option(key=key, kind=kinds.WHOLE, group=group, metavar="N", shown_default=str(default),
                  help=what)  # fmt: skip


OPTIONS = (
    Option(key="workers", kind=kinds.WORKERS, group=WORKERS, metavar="URL",
           shown_default="none: have to be given",
           help="servers to bind requests to; in a file also objects with url, name, slots, room "
           "and headers, so that several workers may be ranks of one server"),
    Option(key="policy", kind=kinds.NAME, group=WORKERS, metavar="NAME", shown_default="fit",
           help="which worker serves a request, and when that is decided; or PACKAGE:OBJECT"),
    Option(key="policy_options", kind=kinds.SETTINGS, group=WORKERS, metavar="NAME=VALUE",
           shown_default="as the policy is published",
           help="how the policy is set, such as window=32; a mapping in a file"),
    Option(key="slots", kind=kinds.WHOLE, group=WORKERS, metavar="N", shown_default="256",
           help="requests that a worker has at once, where its entry does not say"),
    Option(key="room", kind=kinds.WHOLE, group=WORKERS, metavar="TOKENS", shown_default="no limit",
           help="tokens in a worker's KV cache, where its entry does not say"),
    Option(key="worker_key_file", kind=kinds.PATH, group=WORKERS, metavar="FILE",
           shown_default="the client's own is passed on", help="API key that workers are sent"),
    Option(key="client_rank", kind=kinds.CLIENT_RANK, group=WORKERS, metavar="|".join(ClientRank),
           shown_default=ClientRank.HONOUR.value,
           help="whether a client may choose a worker, by X-data-parallel-rank or by "
           "data_parallel_rank in its body"),
    Option(key="host", kind=kinds.NAME, group=WHERE, metavar="ADDRESS",
           shown_default=_ACCESS.host, help="address to listen on"),
    Option(key="port", kind=kinds.WHOLE, group=WHERE, metavar="PORT",
           shown_default=str(_ACCESS.port), help="port to listen on; 0 picks a free one"),
    Option(key="api_key_file", kind=kinds.PATH, group=WHERE, metavar="FILE", shown_default="none",
           help="keys that admit a client, one a line"),
    Option(key="tls_cert", kind=kinds.PATH, group=WHERE, metavar="FILE", shown_default="no TLS",
           help="certificates, as PEM"),
    Option(key="tls_key", kind=kinds.PATH, group=WHERE, metavar="FILE",
           shown_default="in --tls-cert", help="private key, as PEM"),
    _bytes("max_body", _LIMITS.body, "longest body of a request (413)"),
    _bytes("max_header", _LIMITS.header, "longest head of a request (431)"),
    _bytes("max_buffered", _LIMITS.buffered, "bodies of all requests together (429)"),
    _bytes("max_answer", _LIMITS.answer, "longest answer that is not streamed (502)"),
    _count("max_concurrency", _LIMITS.concurrency, LIMITS, "requests at once (429)"),
    _count("max_held", _LIMITS.held, LIMITS, "requests that wait for a worker (429)"),
    _count("max_connections", _LIMITS.connections, LIMITS, "connections of clients"),
    _count("attempts", _LIMITS.attempts, LIMITS, "times that a request is sent to a worker"),
    _wait("connect", _PATIENCE.connect, "for a worker to take a connection (another worker)"),
    _wait("first_token", _PATIENCE.first_token, "for the first token of a stream (504)"),
    _wait("token", _PATIENCE.token, "from one token of a stream to the next (an error event), and "
          "for the client to take it"),
    _wait("total", _PATIENCE.total, "for a request altogether (504)"),
    _wait("hold", _PATIENCE.hold, "for a worker with a free slot (503)"),
    _wait("header", _PATIENCE.header, "for the head of a request (408)"),
    _wait("body", _PATIENCE.body, "for the body of a request (408)"),
    _wait("idle", _PATIENCE.idle, "for the next request of a connection"),
    _wait("drain", _PATIENCE.drain, "for requests under way, once told to end"),
    Option(key="health_interval", kind=kinds.SECONDS, group=HEALTH, metavar="SECONDS",
           shown_default=f"{_HEALTH.interval:g}",
           help="from one GET /health to the next; a tenth of it while in doubt"),
    Option(key="health_timeout", kind=kinds.SECONDS, group=HEALTH, metavar="SECONDS",
           shown_default=f"{_HEALTH.timeout:g}", help="for its answer"),
    _count("draining_after", _HEALTH.draining_after, HEALTH,
           "questions without a good answer, after which a worker gets no more requests"),
    _count("lost_after", _HEALTH.lost_after, HEALTH,
           "questions without any answer, after which what a worker had is given up"),
    _count("serving_after", _HEALTH.serving_after, HEALTH,
           "good answers in a row, after which a worker gets requests again"),
    Option(key="metrics", kind=kinds.SETTINGS, group=HEALTH, metavar="NAME=VALUE",
           shown_default="workers are not asked",
           help="by which names workers tell Prometheus what they have to do, for policies that "
           "need to know: waiting=NAME running=NAME, kv_usage=NAME or tokens=NAME, "
           "rank_label=LABEL, interval=SECONDS, timeout=SECONDS, path=/metrics"),
    Option(key="log", kind=kinds.PATH, group=WATCHING, metavar="FILE", shown_default="none",
           help="append what became of each request there, as JSON lines"),
    Option(key="wandb", kind=kinds.NAME, group=WATCHING, metavar="PROJECT", shown_default="none",
           help="send charts to this project at Weights & Biases; takes equipoise[wandb]"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class RouteRequest:
    """What one `equipoise route` was asked for: options as they were given, by key."""

    workers: tuple[object, ...] = ()
    policy: str = "fit"
    policy_options: tuple[tuple[str, object], ...] = ()
    metrics: tuple[tuple[str, object], ...] = ()
    slots: int = 256
    room: int | None = None
    worker_key_file: Path | None = None
    api_key_file: Path | None = None
    client_rank: ClientRank = ClientRank.HONOUR
    host: str = _ACCESS.host
    port: int = _ACCESS.port
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log: Path | None = None
    wandb: str | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    """Those of limits, waits and health."""
