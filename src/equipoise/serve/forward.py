"""Questions that any worker can answer, such as which models there are."""

import asyncio

import aiohttp
from aiohttp import web

from equipoise.serve.client_connection import NAME
from equipoise.serve.dispatcher import Desk
from equipoise.serve.headers import towards_client, towards_worker
from equipoise.serve.outcomes import Fault, Outcome, Refused, bad_request
from equipoise.serve.request_state import least
from equipoise.serve.settings import RouteSettings
from equipoise.serve.upstream import FAILURES, AttemptFailed, WholeAnswer, opened, read_whole, said

MODELS = "/v1/models"
QUESTIONS = (MODELS, "/version")
"""What is passed on: servers also take commands by GET, such as SGLang's `/flush_cache` and
`/release_memory_occupation`, and the proxy's own key must not open those."""
LONGEST = 60.0
"""Seconds for an answer."""
NOBODY = -1
"""The number of no worker."""
NO_WORKER = Fault(503, Outcome.WORKERS_FAILED, "no worker serves", "no_worker")


def forwarded(path: str) -> bool:
    """Whether a worker may be asked for `path`, decoded and without its query.

    One model is asked for as `/v1/models/NAME`, and a name may have slashes; with a segment of dots
    it would become another path on its way.
    """
    if path in QUESTIONS:
        return True
    prefix, _, name = path.partition(MODELS + "/")
    return not prefix and bool(name) and not {"", ".", ".."} & set(name.split("/"))


class Forward:
    """Passes a GET on to a worker that serves, and to another one if that fails."""

    def __init__(self, settings: RouteSettings, desk: Desk, client: aiohttp.ClientSession) -> None:
        self._settings, self._desk, self._client = settings, desk, client

    async def answer(self, request: web.BaseRequest, name: str) -> web.Response:
        """Raises Refused where no worker answers."""
        path = request.raw_path
        if not path.startswith("/"):
            # An absolute target names a server, and a worker's address is not to be made of it.
            raise bad_request("the target of a request has to begin with a slash")
        failed, avoided = NO_WORKER, NOBODY
        for _ in range(self._settings.limits.attempts):
            worker = least(self._desk.workers, avoided)
            if worker is None:
                break
            try:
                return _response(await self._ask(request, worker, path, name), name)
            except AttemptFailed as error:
                failed, avoided = error.fault, worker
        raise Refused(failed)

    async def _ask(
        self, request: web.BaseRequest, number: int, path: str, name: str
    ) -> WholeAnswer:
        worker = self._settings.workers[number]
        key = self._settings.access.worker_key
        headers = towards_worker(request.headers, worker, key, name)
        try:
            async with (
                asyncio.timeout(LONGEST),
                opened(self._client, request.method, worker.url + path, headers, None) as answer,
            ):
                return await read_whole(answer, self._settings.limits)
        except FAILURES as error:
            raise AttemptFailed(said(error)) from error


def _response(whole: WholeAnswer, name: str) -> web.Response:
    headers = [*towards_client(whole.headers, name), ("Server", NAME)]
    return web.Response(status=whole.status, headers=headers, body=whole.body)
