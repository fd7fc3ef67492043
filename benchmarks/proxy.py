"""What the proxy adds to a request: the same request with and without it, in turns.

    python benchmarks/proxy.py
    python benchmarks/proxy.py --cpu       seconds of CPU that a streamed token costs instead
    python benchmarks/proxy.py --quick     one short round; nothing is kept

One client on one connection, one worker that answers at once, all on this machine's loopback
address, each a process of its own. A pair is one request straight to the worker and one through the
proxy, in an order that alternates; rounds are interleaved pairs. Added is the difference of the
percentiles of both, in one round; of rounds there is the median, the lowest and the highest.

With `--cpu`: 64 streams at once of a worker that makes a token for each of them in every step of
40 ms: through the proxy, the proxy under uvloop, one of aiohttp that passes bytes on, nginx and
Envoy; the last two and uvloop where they are installed (`lib/native_proxies.py`). CPU time is of
the proxy's process, user and system, from the first request to the last; a core's tokens a second
are what one core could relay at that cost.

Writes benchmarks/results/proxy.json or proxy_cpu.json; `python benchmarks/report.py` shows them.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from lib.native_proxies import native_proxies
from lib.results import Row, save, spread
from report import show

ROUNDS, PAIRS, WARM = 7, 300, 50
READY_TIMEOUT = 60.0
WORKER = Path(__file__).parent / "lib" / "answering_worker.py"
MESSAGE = {"role": "user", "content": "how long does it take? " * 20}
KINDS = {"whole answer": False, "first token": True}
STEPPING_WORKER = Path(__file__).parent / "lib" / "stepping_worker.py"
PLAIN_PROXY = Path(__file__).parent / "lib" / "plain_proxy.py"
PLAIN = "plain aiohttp"
CPU_ROUNDS, STREAMS, TOKENS, STEP_SECONDS = 5, 64, 150, 0.04
WITHOUT_UVLOOP = """
import sys
sys.modules["uvloop"] = None
from equipoise.cli.main import main
sys.exit(main())
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A child of Python that is ended behind it."""
    with running_program(sys.executable, *command) as child:
        yield child


@contextmanager
def running_program(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A child that is ended behind it."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=READY_TIMEOUT)


def first_line_with(child: subprocess.Popen[str], word: str) -> str:
    """The first line with `word` in it."""
    assert child.stdout is not None
    for line in child.stdout:
        if word in line:
            return line
    raise RuntimeError(f"{child.args} ended before it said {word!r}")


async def once(client: aiohttp.ClientSession, url: str, streamed: bool) -> float:
    """Seconds until the first of the answer's body, and all of it is read."""
    request: dict[str, Any] = {"model": "m", "messages": [MESSAGE], "stream": streamed}
    began = time.perf_counter()
    async with client.post(f"{url}/v1/chat/completions", json=request) as answer:
        assert answer.status == 200, await answer.read()
        await answer.content.readany()
        seconds = time.perf_counter() - began
        await answer.read()
    return seconds


async def measure_rounds(
    direct: str, proxy: str, streamed: bool, rounds: int
) -> list[dict[str, float]]:
    """Of each round, milliseconds."""
    async with aiohttp.ClientSession() as client:
        for _ in range(WARM):
            await once(client, direct, streamed)
            await once(client, proxy, streamed)
        return [await one_round(client, direct, proxy, streamed) for _ in range(rounds)]


async def one_round(
    client: aiohttp.ClientSession, direct: str, proxy: str, streamed: bool
) -> dict[str, float]:
    """Percentiles of both, and what is between them."""
    seconds: dict[str, list[float]] = {direct: [], proxy: []}
    for number in range(PAIRS):
        for url in (direct, proxy) if number % 2 else (proxy, direct):
            seconds[url].append(await once(client, url, streamed))
    percentiles = {}
    for percent in (50, 99):
        direct_seconds, proxy_seconds = (
            float(np.percentile(seconds[url], percent)) for url in (direct, proxy)
        )
        percentiles[f"direct_p{percent}_ms"] = direct_seconds * 1e3
        percentiles[f"proxy_p{percent}_ms"] = proxy_seconds * 1e3
        percentiles[f"added_p{percent}_ms"] = (proxy_seconds - direct_seconds) * 1e3
    return percentiles


async def ready(url: str) -> None:
    """Wait until the proxy listens, and has found its worker."""
    async with asyncio.timeout(READY_TIMEOUT), aiohttp.ClientSession() as client:
        while True:
            with suppress(aiohttp.ClientConnectorError):
                async with client.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


async def stream(client: aiohttp.ClientSession, url: str, tokens: int) -> None:
    """Read one stream to its end."""
    request = {"model": "m", "messages": [MESSAGE], "stream": True, "max_tokens": tokens}
    async with client.post(f"{url}/v1/chat/completions", json=request) as answer:
        events = (await answer.read()).count(b"data: {")
        assert (answer.status, events) == (200, tokens)


async def stream_all(url: str, tokens: int) -> None:
    """All streams at once."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        await asyncio.gather(*(stream(client, url, tokens) for _ in range(STREAMS)))


def cpu_seconds(process: int) -> float:
    """Of a process so far, user and system, by its own clock: `clock_getcpuclockid(3)`.

    The ticks of /proc are too coarse for a native proxy, whose round takes a few of them.
    """
    return time.clock_gettime((~process << 3) | 2)


def cpu_per_token(process: int, url: str, tokens: int) -> float:
    """Microseconds of CPU of the proxy."""
    before = cpu_seconds(process)
    asyncio.run(stream_all(url, tokens))
    return (cpu_seconds(process) - before) * 1e6 / (STREAMS * tokens)


def measure_cpu(rounds: int, tokens: int) -> list[Row]:
    """A row for each proxy; they take turns."""
    with ExitStack() as stack:
        worker = stack.enter_context(running(str(STEPPING_WORKER), str(STEP_SECONDS)))
        direct = f"http://127.0.0.1:{first_line_with(worker, '').strip()}"
        plain = stack.enter_context(running(str(PLAIN_PROXY), direct))
        port = first_line_with(plain, "").strip()
        proxies = {PLAIN: (plain.pid, f"http://127.0.0.1:{port}")}
        kinds = {"equipoise": ("-c", WITHOUT_UVLOOP)}
        if find_spec("uvloop") is not None:
            kinds["equipoise, uvloop"] = ("-m", "equipoise")
        for name, start in kinds.items():
            command = (*start, "route", "--workers", direct, "--port", "0")
            child = stack.enter_context(running(*command))
            proxies[name] = (child.pid, first_line_with(child, "serving on").split()[3].rstrip(","))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        worker_port = int(direct.rpartition(":")[2])
        for name, (native_command, port) in native_proxies(worker_port, folder).items():
            child = stack.enter_context(running_program(*native_command))
            proxies[name] = (child.pid, f"http://127.0.0.1:{port}")
        for _, url in proxies.values():
            asyncio.run(ready(url))
        costs: dict[str, list[float]] = {name: [] for name in proxies}
        for number in range(rounds + 1):
            for name, (process, url) in proxies.items():
                cost = cpu_per_token(process, url, tokens)
                if number or not rounds:
                    costs[name].append(cost)  # the first round warms up
    return [
        {
            "proxy": name,
            "cpu_us": spread(each),
            "tokens_per_core": spread(1e6 / one for one in each),
            "ratio": spread(one / base for one, base in zip(each, costs[PLAIN], strict=True)),
        }
        for name, each in costs.items()
    ]


def main_cpu(quick: bool) -> int:
    """Measure, print, keep."""
    rows = measure_cpu(0 if quick else CPU_ROUNDS, 5 if quick else TOKENS)
    kept = {"per_core": next(row for row in rows if row["proxy"] == "equipoise")["tokens_per_core"]}
    show("proxy_cpu", kept, {"proxies": rows})
    if not quick:
        save("proxy_cpu", ["python", "benchmarks/proxy.py", "--cpu"], kept, {"proxies": rows})
    return 0


def figures(rows: list[Row]) -> Row:
    """What the bar is about."""
    return {"added": max((row["added_p50_ms"] for row in rows), key=lambda values: values[0])}


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round; nothing is kept")
    parser.add_argument("--cpu", action="store_true", help="CPU a streamed token")
    arguments = parser.parse_args()
    quick = arguments.quick
    if arguments.cpu:
        return main_cpu(quick)
    rows: list[Row] = []
    with running(str(WORKER)) as worker:
        direct = f"http://127.0.0.1:{first_line_with(worker, '').strip()}"
        with running("-m", "equipoise", "route", "--workers", direct, "--port", "0") as child:
            proxy = first_line_with(child, "serving on").split()[3].rstrip(",")
            asyncio.run(ready(proxy))
            for kind, streamed in KINDS.items():
                rounds = asyncio.run(
                    measure_rounds(direct, proxy, streamed, 1 if quick else ROUNDS)
                )
                spreads = {key: spread(one[key] for one in rounds) for key in rounds[0]}
                rows.append({"until": kind, **spreads})
    show("proxy", figures(rows), {"kinds": rows})
    if not quick:
        save("proxy", ["python", "benchmarks/proxy.py"], figures(rows), {"kinds": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
