"""Runs a proxy as a program: from its settings to its exit code."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from equipoise.balancer.requests.policy_factory import PolicyFactory
from equipoise.hal.errors import EquipoiseError, UsageError
from equipoise.serve.cancel_scope import wait_for_any
from equipoise.serve.policy_client import PolicyClient, check_policy_takes_over
from equipoise.serve.proxy import Proxy
from equipoise.serve.settings import RouteSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_CUT_OFF = 1
UVLOOP = "uvloop"
PrintLine = Callable[[str], None]


class DrainableServer(Protocol):
    """A proxy or a picker."""

    async def stop(self) -> int:
        """Let what is under way end; returns how many requests did not."""
        ...

    def skip_drain(self) -> None:
        """Wait for them no longer."""
        ...


class SignalListener:
    """Hears signals, from its making until it is closed.

    Attributes:
        count: signals so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._hear)

    async def wait_or(self, other: asyncio.Event) -> None:
        """Wait for a signal, or for `other`."""
        await wait_for_any(self._event, other)

    async def wait_again(self) -> None:
        """Wait for a further signal."""
        # The event is still set by the signal that ended `wait_or`.
        self._event.clear()
        await self._event.wait()

    def close(self) -> None:
        """Hear no more."""
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    def _hear(self) -> None:
        self.count += 1
        self._event.set()


def serve(settings: RouteSettings, factory: PolicyFactory, say: PrintLine) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends it at once.

    Returns 0 if every request that had been taken came to its end, 1 if some were cut off.

    Raises: UsageError where it cannot listen there, or for a policy that cannot take the place of a
        policy server's; EquipoiseError where a part of it failed.
    """
    if settings.policy_server is not None:
        check_policy_takes_over(factory)
    with (
        log_to_stderr("equipoise.route", "equipoise.balancer.requests"),
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(_serve(settings, factory, say))


class _LineFormatter(logging.Formatter):
    """Says once who it is: what also runs in engines says so itself."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.removeprefix("equipoise: ")
        return super().formatMessage(record)


@contextmanager
def log_to_stderr(*names: str) -> Iterator[None]:
    """Show what these loggers say, a line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter("equipoise: %(message)s"))
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop's event loop, which costs less a token, where that is installed."""
    if find_spec(UVLOOP) is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module(UVLOOP).new_event_loop
    return factory


async def _serve(settings: RouteSettings, factory: PolicyFactory, say: PrintLine) -> int:
    workers = settings.workers
    slots, kv_tokens = [one.slots for one in workers], [one.kv_tokens for one in workers]
    make_policy = partial(factory, slots, kv_tokens)
    # Before the proxy starts: a signal that comes during the start ends it as any other does.
    signals = SignalListener()
    try:
        proxy = Proxy(settings, make_policy())
        await _start(proxy, settings, say)
        if settings.policy_server is not None:
            client = PolicyClient(proxy.dispatcher, settings.policy_server, make_policy)
            proxy.tasks.start("policy client", client.run())
        await signals.wait_or(proxy.tasks.failed)
        failed = not signals.count
        say("ending: waiting for the requests under way")
        cut_off = await drain(proxy, signals)
    finally:
        signals.close()
    if failed:
        raise EquipoiseError("a part of the proxy failed: see above")
    if cut_off:
        say(f"{cut_off} request(s) were cut off")
    return EXIT_CUT_OFF if cut_off else 0


async def _start(proxy: Proxy, settings: RouteSettings, say: PrintLine) -> None:
    access = settings.access
    try:
        await proxy.start()
    except (OSError, UnicodeError) as error:  # the second: no name that a resolver takes
        await proxy.stop()
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--host {access.host} --port {access.port}: {why}") from error
    scheme = "http" if access.certificate is None else "https"
    say(f"serving on {scheme}://{access.host}:{proxy.port}, {len(settings.workers)} worker(s)")


async def drain(server: DrainableServer, signals: SignalListener) -> int:
    """Stop it once what is under way has ended; a further signal ends that wait."""
    hurry = asyncio.create_task(signals.wait_again())
    hurry.add_done_callback(lambda task: None if task.cancelled() else server.skip_drain())
    try:
        return await server.stop()
    finally:
        hurry.cancel()
