"""Cross-origin requests: what a browser has to be told before a page may use the API.

https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from collections.abc import Mapping, Sequence

from aiohttp import web

ANY_ORIGIN = "*"
REQUEST_METHOD, REQUEST_HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"
EXPOSED = "X-Request-Id, Retry-After"
MAX_AGE = "600"
"""Seconds for which a browser need not ask again."""
MAX_HEADERS_LENGTH = 2048
"""Letters of the headers that a page asks for, which are sent back."""


def is_preflight(request: web.BaseRequest) -> bool:
    """Whether a browser asks in the name of a page, which has no key to send yet."""
    has_origin = "Origin" in request.headers
    return request.method == "OPTIONS" and has_origin and REQUEST_METHOD in request.headers


def cors_headers(origins: Sequence[str], headers: Mapping[str, str]) -> dict[str, str]:
    """Of an answer to a request with these headers; none where no page of `origins` sent it."""
    origin = headers.get("Origin")
    if origin is None or not (ANY_ORIGIN in origins or origin in origins):
        return {}
    # Never with credentials: keys are sent by pages that have them, not by browsers on their own.
    if ANY_ORIGIN in origins:
        return {"Access-Control-Allow-Origin": ANY_ORIGIN, "Access-Control-Expose-Headers": EXPOSED}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": EXPOSED,
        "Vary": "Origin",
    }


def preflight_headers(methods: Sequence[str], headers: Mapping[str, str]) -> dict[str, str]:
    """What a page may send."""
    answer = {
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Max-Age": MAX_AGE,
    }
    names = headers.get(REQUEST_HEADERS, "")
    if 0 < len(names) <= MAX_HEADERS_LENGTH:
        answer["Access-Control-Allow-Headers"] = names
    return answer
