"""Deployments for a real Ray Serve: the decoder of the examples, with a journal; its caller."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from decoder_app import Decoder


class JournaledDecoder(Decoder):
    """Adds a line with its process and the request's number to `request["journal"]`."""

    async def stream(self, request: Mapping[str, Any]) -> AsyncIterator[int]:
        with Path(request["journal"]).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps([os.getpid(), request["number"]]) + "\n")
        async for token in super().stream(request):
            yield token


class Ingress:
    """Calls a decoder: a process with a router of its own."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    async def complete_all(self, requests: list[Mapping[str, Any]]) -> list[int]:
        """One call for each: they share the id of the request that they belong to."""
        answers = (self._decoder.complete.remote(one) for one in requests)
        return list(await asyncio.gather(*answers))

    def counts(self) -> dict[str, Any]:
        """What its router counted, and what it has left."""
        router = self._decoder._router._asyncio_router.request_router
        return {**router.counts, "left": len(router.pool.dispatcher.requests)}


def read_journal(path: Path) -> list[tuple[int, int]]:
    """Processes and numbers, in the order in which requests were begun."""
    return [tuple(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
