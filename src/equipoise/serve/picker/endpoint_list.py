"""Where the endpoints are known from: options, a watched file, or a name in DNS."""

import asyncio
import logging
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from equipoise.hal.errors import UsageError
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.settings import (
    DnsEndpoints,
    EndpointsFile,
    EndpointSource,
    StaticEndpoints,
)
from equipoise.serve.settings import WorkerSettings

LOG = logging.getLogger("equipoise.picker")
FileVersion: TypeAlias = tuple[int, int, int]
NO_VERSION: FileVersion = (-1, -1, -1)
"""Of no file."""


async def first_endpoints(source: EndpointSource) -> tuple[WorkerSettings, ...]:
    """The endpoints to begin with. Raises UsageError for a file that cannot be taken."""
    match source:
        case StaticEndpoints(workers=workers):
            return workers
        case EndpointsFile():
            return source.read(source.path)
        case DnsEndpoints():
            return await _resolved(source) or ()


async def follow_endpoints(source: EndpointSource, pool: EndpointPool) -> None:
    """Tell the pool of changes, until cancelled; ends at once where there can be none."""
    match source:
        case EndpointsFile():
            await _follow_file(source, pool)
        case DnsEndpoints():
            while True:
                await asyncio.sleep(source.interval)
                workers = await _resolved(source)
                if workers is not None:
                    pool.set_endpoints(workers)


async def _follow_file(source: EndpointsFile, pool: EndpointPool) -> None:
    version: FileVersion | None = NO_VERSION
    while True:
        # The first look is at once: the file may have changed since it was read. One that is gone
        # is read once, too: what is wrong is logged by that.
        latest = _version(source.path)
        if latest != version:
            version = latest
            try:
                pool.set_endpoints(source.read(source.path))
            except UsageError as error:
                # A file that is being written, or a mistake: what serves goes on.
                LOG.warning("the list of endpoints stays as it is: %s", error)
        await asyncio.sleep(source.interval)


def _version(path: Path) -> FileVersion | None:
    """Changes with the file: Kubernetes replaces a link, an editor replaces or writes the file.

    None: there is no such file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        LOG.debug("%s: %s", path, error)
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


async def _resolved(source: DnsEndpoints) -> tuple[WorkerSettings, ...] | None:
    """None: the name has no answer, or none that Envoy takes: the endpoints that are known stay."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(source.interval):
            infos = await loop.getaddrinfo(source.name, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        LOG.warning("%s is not resolved, the endpoints stay: %s", source.name, error)
        return None
    addresses = sorted({str(address[0]) for *_, address in infos})
    usable = [address for address in addresses if "%" not in address]
    for address in addresses:
        if address not in usable:
            _log_zone(source.name, address)
    if not usable:
        return None
    return tuple(
        _worker(f"[{address}]" if ":" in address else address, port, source)
        for address in usable
        for port in source.ports
    )


@lru_cache(maxsize=256)
def _log_zone(name: str, address: str) -> None:
    """Cached so that an address is logged once, and not with every look."""
    LOG.warning(
        "%s: %s is no endpoint: its zone is this machine's, and Envoy takes none", name, address
    )


def _worker(host: str, port: int, source: DnsEndpoints) -> WorkerSettings:
    return WorkerSettings(
        url=f"http://{host}:{port}",
        name=f"{host}:{port}",
        slots=source.slots,
        kv_tokens=source.kv_tokens,
    )
