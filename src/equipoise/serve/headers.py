"""Headers that are passed on between client and worker, and those that belong to one connection.

Hop-by-hop headers: RFC 9110, section 7.6.1.
"""

import re
from collections.abc import Iterable, Mapping
from uuid import uuid4

from equipoise.serve.settings import RANK_HEADER, WorkerSettings

REQUEST_ID = "X-Request-Id"
API_KEY_HEADER = "X-Api-Key"
"""Header by which Anthropic's clients send their key."""
MAX_ID_LENGTH = 128
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
PROXY_REQUEST_HEADERS = frozenset(
    {"host", "content-length", "expect", "accept-encoding", REQUEST_ID.lower()}
    | {RANK_HEADER.lower()}
)
"""Of a request: the proxy's own to set towards a worker."""
PROXY_RESPONSE_HEADERS = frozenset(
    {"content-length", "content-encoding", "server", "date", REQUEST_ID.lower()}
    | {"access-control-allow-origin", "access-control-allow-credentials"}
    | {"access-control-expose-headers"}
)
"""Of an answer: the proxy's own to set towards a client; what was compressed has been read."""
ID = re.compile(r"[!-~]+", re.ASCII)


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own, if it is fit to be written into logs; else a new one."""
    text = headers.get(REQUEST_ID, "")
    if len(text) <= MAX_ID_LENGTH and ID.fullmatch(text):
        return text
    return uuid4().hex


def worker_request_headers(
    headers: Mapping[str, str], worker: WorkerSettings, key: str | None, name: str
) -> list[tuple[str, str]]:
    """Headers of the request that a worker gets.

    Args:
        headers: the client's.
        worker: its own headers replace the client's.
        key: sent instead of the client's, in whichever header that came; None: the client's is.
        name: the request's id.
    """
    own = {one.lower() for one in worker.headers} | PROXY_REQUEST_HEADERS
    if key is not None:
        own |= {"authorization", API_KEY_HEADER.lower()}
    pairs = _end_to_end_headers(headers, own)
    # What is compressed could not be read, and its tokens not be counted.
    pairs += [(REQUEST_ID, name), ("Accept-Encoding", "identity"), *worker.headers.items()]
    if key is not None:
        pairs.append(("Authorization", f"Bearer {key}"))
    return pairs


def client_response_headers(headers: Mapping[str, str], name: str) -> list[tuple[str, str]]:
    """Headers of the answer that a client gets."""
    return [*_end_to_end_headers(headers, PROXY_RESPONSE_HEADERS), (REQUEST_ID, name)]


def _end_to_end_headers(
    headers: Mapping[str, str], without: Iterable[str]
) -> list[tuple[str, str]]:
    text = [value for name, value in headers.items() if name.lower() == "connection"]
    connection_names = (part.strip().lower() for value in text for part in value.split(","))
    stopped = HOP_BY_HOP.union(without, connection_names)
    return [(name, value) for name, value in headers.items() if name.lower() not in stopped]
