"""Workers and their metrics in the configuration of `equipoise route`, read and checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

from equipoise.hal.errors import UsageError
from equipoise.serve.settings import ReportSettings, WorkerSettings

WORKER_KEYS = ("url", "name", "slots", "kv_tokens", "headers")
MAX_WORKERS = 4096
MAX_SLOTS = 1 << 20
MAX_KV_TOKENS = 1 << 48
HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.ASCII)
"""Names of headers: RFC 9110, section 5.6.2."""
HEADER_VALUE = re.compile(r"[ \t!-~]*", re.ASCII)
RESERVED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})


def worker_settings(
    entries: Sequence[object], slots: int, kv_tokens: int | None
) -> tuple[WorkerSettings, ...]:
    """Urls, or mappings of `WORKER_KEYS`; `slots` and `kv_tokens` where an entry does not say.

    Raises UsageError naming the entry and what is wrong with it.
    """
    if not entries:
        raise UsageError("workers are needed: --workers URL ..., or `workers:` in --config")
    if len(entries) > MAX_WORKERS:
        raise UsageError(f"--workers: at most {MAX_WORKERS}, got {len(entries)}")
    workers = tuple(
        _worker(number, entry, slots, kv_tokens) for number, entry in enumerate(entries, start=1)
    )
    names = [one.name for one in workers]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"workers: two are called {name}: give them names")
    return workers


def _worker(number: int, entry: object, slots: int, kv_tokens: int | None) -> WorkerSettings:
    where = f"workers: entry {number}"
    values: Mapping[object, object] = (
        {"url": entry} if isinstance(entry, str) else _mapping(where, entry)
    )
    url = parse_url(f"{where}: url", values.get("url"))
    name = values.get("name", f"{urlsplit(url).netloc}{urlsplit(url).path}")
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= 128:
        raise UsageError(f"{where}: name has to be a short text, got {name!r}")
    worker = WorkerSettings(
        url=url,
        name=name,
        slots=_count(where, "slots", values.get("slots", slots), MAX_SLOTS),
        headers=_headers(where, values.get("headers", {})),
    )
    limit = values.get("kv_tokens", kv_tokens)
    if limit is None:
        return worker
    return replace(worker, kv_tokens=_count(where, "kv_tokens", limit, MAX_KV_TOKENS))


def _mapping(where: str, entry: object) -> Mapping[object, object]:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected a URL or a mapping, got {entry!r}")
    for key in entry:
        if key not in WORKER_KEYS:
            close = get_close_matches(str(key), WORKER_KEYS, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(WORKER_KEYS)}"
            raise UsageError(f"{where}: unknown key {key!r}{hint}")
    return entry


def parse_url(where: str, url: object) -> str:
    """A server's, without a trailing slash. Raises UsageError that begins with `where`."""
    if not isinstance(url, str):
        raise UsageError(f"{where} has to be a text, got {url!r}")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise UsageError(f"{where} {url!r}: {error}") from None
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or port == 0 or not plain:
        raise UsageError(f"{where} has to be http://HOST:PORT, or https, got {url!r}")
    if parts.query or parts.fragment or parts.username is not None:
        raise UsageError(f"{where} must not have a query, a fragment or a user: {url!r}")
    return url.rstrip("/")


def _count(where: str, key: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{where}: {key} has to be a whole number, 1 to {most}, got {value!r}")
    return value


def _headers(where: str, headers: object) -> dict[str, str]:
    if not isinstance(headers, dict):
        raise UsageError(f"{where}: headers have to be a mapping, got {headers!r}")
    for name, value in headers.items():
        if (
            not isinstance(name, str)
            or not HEADER_NAME.fullmatch(name)
            or name.lower() in RESERVED_HEADERS
        ):
            raise UsageError(f"{where}: {name!r} cannot be a header here")
        if not isinstance(value, str) or not HEADER_VALUE.fullmatch(value):
            # YAML reads 3 as a number: "3" is what a header says.
            raise UsageError(f"{where}: header {name} has to be a text in quotes, got {value!r}")
    return dict(headers)


METRIC_NAME_KEYS = "waiting", "running", "kv_usage", "tokens", "generated"
"""`generated` is read by the endpoint picker only."""
SECONDS = "interval", "timeout"
OTHERS = "path", "rank_label"
METRICS_KEYS = (*METRIC_NAME_KEYS, *SECONDS, *OTHERS)
METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
METRICS_PATH = re.compile(r"/[!-~]*", re.ASCII)
MIN_SECONDS, MAX_SECONDS = 0.01, 3600.0


def report_settings(
    values: Mapping[str, object], workers: Sequence[WorkerSettings]
) -> ReportSettings | None:
    """None without any value. Raises UsageError naming the key."""
    if not values:
        return None
    for key in values:
        if key not in METRICS_KEYS:
            raise UsageError(f"--metrics: unknown key {key!r}; known: {', '.join(METRICS_KEYS)}")
    for key in ("waiting", "running"):
        if key not in values:
            raise UsageError(f"--metrics: {key} is needed: the name of a metric")
    names: dict[str, Any] = {key: _read(key, value) for key, value in values.items()}
    settings = ReportSettings(**names)
    _check(settings, workers)
    return settings


def _read(key: str, value: object) -> object:
    if key in SECONDS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not MIN_SECONDS <= float(str(value)) <= MAX_SECONDS:
            raise UsageError(
                f"--metrics: {key} must be {MIN_SECONDS:g} to {MAX_SECONDS:g} seconds, "
                f"got {value!r}"
            )
        return float(str(value))
    shape, word = (METRICS_PATH, "a path") if key == "path" else (METRIC_NAME, "a name")
    if not isinstance(value, str) or not shape.fullmatch(value):
        raise UsageError(f"--metrics: {key} has to be {word}, got {value!r}")
    return value


def _check(settings: ReportSettings, workers: Sequence[WorkerSettings]) -> None:
    if settings.tokens is None:
        roomless = [one.name for one in workers if one.kv_tokens is None]
        if settings.kv_usage is None or roomless:
            of = f" of worker {roomless[0]}" if roomless else ""
            raise UsageError(
                "--metrics: tokens are needed: a metric of that name, or kv_usage and kv_tokens"
                + of
            )
    urls = [one.url for one in workers]
    for one in workers:
        has_rank = settings.rank_label is not None and one.rank is not None
        if urls.count(one.url) > 1 and not has_rank:
            raise UsageError(
                f"--metrics: several workers are {one.url}: rank_label is needed, the label that "
                "tells them apart, and a rank in the headers of each"
            )
