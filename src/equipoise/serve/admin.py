"""Takes workers out of service and back by hand; only for clients on the same machine."""

import ipaddress
import json
import logging

from aiohttp import web

from equipoise.balancer.requests.dispatcher import RequestDispatcher, Running
from equipoise.serve.auth import check_key
from equipoise.serve.client_connection import SERVER_NAME
from equipoise.serve.outcomes import ErrorResponse, RequestOutcome, RequestRefused, bad_request
from equipoise.serve.settings import RouteSettings

LOG = logging.getLogger("equipoise.route")
WORKERS = "/workers"
PREFIX = "/workers/"
DRAIN, RESUME = "drain", "resume"
FOREIGN_HEADERS = ("Origin", "Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""Present where a web page or a reverse proxy sends the request: not a user of this machine."""
NOT_LOCAL = ErrorResponse(
    403, RequestOutcome.UNAUTHORIZED, "workers are looked after from this machine only", "not_local"
)


class Admin:
    """`GET /workers`, `POST /workers/NAME/drain` and `POST /workers/NAME/resume`."""

    def __init__(self, settings: RouteSettings, dispatcher: RequestDispatcher) -> None:
        self._access, self._dispatcher = settings.access, dispatcher
        self._numbers = {one.name: number for number, one in enumerate(settings.workers)}

    def answer(self, request: web.BaseRequest) -> web.Response:
        """What became of it. Raises RequestRefused: 403 from elsewhere, 401 without a key, 404."""
        if not is_local(request):
            raise RequestRefused(NOT_LOCAL)
        check_key(self._access, request.headers)
        if request.method != "POST":
            return _json({"workers": [self._about(name) for name in self._numbers]})
        # A worker's name may have a slash in it.
        name, _, action = request.path.removeprefix(PREFIX).rpartition("/")
        if action not in (DRAIN, RESUME) or name not in self._numbers:
            routes = f"POST {PREFIX}NAME/{DRAIN} or /{RESUME}, NAME out of GET {WORKERS}"
            raise bad_request(f"{request.path} is not there: {routes}", 404, "not_found")
        if action == DRAIN:
            self._dispatcher.drain_worker(self._numbers[name])
        else:
            self._dispatcher.resume_worker(self._numbers[name])
        LOG.warning("%s: %s, by hand", name, action)
        return _json(self._about(name))

    def _about(self, name: str) -> dict[str, object]:
        view = self._dispatcher.workers[self._numbers[name]]
        return {
            "name": name,
            "state": view.state.value,
            "manually_drained": view.manually_drained,
            "requests": len(view.requests),
            "running": sum(isinstance(one.status, Running) for one in view.requests.values()),
        }


def is_local(request: web.BaseRequest) -> bool:
    """Whether it comes from this machine, and from neither a web page nor a reverse proxy."""
    if any(name in request.headers for name in FOREIGN_HEADERS):
        return False
    try:
        address = ipaddress.ip_address(request.remote or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # what an IPv6 socket sees of IPv4
    return (mapped or address).is_loopback


def _json(about: object) -> web.Response:
    headers = {"Content-Type": "application/json", "Server": SERVER_NAME}
    return web.Response(body=json.dumps(about).encode(), headers=headers)
