"""Runs a proxy as a program: from its settings to its exit code."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

from equipoise.hal.errors import EquipoiseError, UsageError
from equipoise.serve.policies import PolicyFactory
from equipoise.serve.proxy import Proxy
from equipoise.serve.settings import RouteSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CUT_OFF = 1
Say = Callable[[str], None]


def serve(settings: RouteSettings, factory: PolicyFactory, say: Say) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends it at once.

    Returns 0 if every request that had been taken came to its end, 1 if some were cut off.

    Raises: UsageError where it cannot listen there; EquipoiseError where a part of it failed.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("equipoise: %(message)s"))
    logger = logging.getLogger("equipoise.route")
    logger.addHandler(handler)
    try:
        return asyncio.run(_serve(settings, factory, say))
    finally:
        logger.removeHandler(handler)


async def _serve(settings: RouteSettings, factory: PolicyFactory, say: Say) -> int:
    workers, access = settings.workers, settings.access
    policy = factory([one.slots for one in workers], [one.room for one in workers])
    proxy = Proxy(settings, policy)
    try:
        await proxy.start()
    except OSError as error:
        await proxy.stop()
        why = error.strerror or str(error)
        raise UsageError(f"--host {access.host} --port {access.port}: {why}") from error
    scheme = "http" if access.certificate is None else "https"
    say(f"serving on {scheme}://{access.host}:{proxy.port}, {len(workers)} worker(s)")
    failed = await _until_told(proxy)
    left = await _stopped(proxy, say)
    if failed:
        raise EquipoiseError("a part of the proxy failed: see above")
    if left:
        say(f"{left} request(s) were cut off")
    return CUT_OFF if left else 0


async def _until_told(proxy: Proxy) -> bool:
    """Whether a part of it failed before anybody said so."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, told.set)
    waits = [asyncio.create_task(one.wait()) for one in (told, proxy.crew.failed)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()
    return not told.is_set()


async def _stopped(proxy: Proxy, say: Say) -> int:
    """Wait for what is under way; a further signal ends that."""
    say("ending: waiting for the requests under way")
    stopping = asyncio.create_task(proxy.stop())
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, proxy.hurry)
    try:
        return await stopping
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
