"""What the proxy adds to a request: the same request with and without it, in turns.

    python benchmarks/route.py                      a table
    python benchmarks/route.py --json               and benchmarks/results/route.json

One client on one connection, one worker that answers at once, all on this machine's loopback
address, each a process of its own. A pair is one request straight to the worker and one through the
proxy, in an order that alternates; rounds are interleaved pairs. Added is the difference of the
percentiles of both, in one round; of rounds there is the median, the lowest and the highest.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from evidence import save

ROUNDS, PAIRS, WARM = 7, 300, 50
PATIENCE = 60.0
WORKER = Path(__file__).parent / "route_worker.py"
MESSAGE = {"role": "user", "content": "how long does it take? " * 20}
KINDS = {"whole answer": False, "first token": True}


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A child that is ended behind it."""
    child = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=PATIENCE)


def said(child: subprocess.Popen[str], word: str) -> str:
    """The first line with `word` in it."""
    assert child.stdout is not None
    for line in child.stdout:
        if word in line:
            return line
    raise RuntimeError(f"{child.args} ended before it said {word!r}")


async def once(client: aiohttp.ClientSession, url: str, streamed: bool) -> float:
    """Seconds until the first of the answer's body, and all of it is read."""
    asked: dict[str, Any] = {"model": "m", "messages": [MESSAGE], "stream": streamed}
    began = time.perf_counter()
    async with client.post(f"{url}/v1/chat/completions", json=asked) as answer:
        assert answer.status == 200, await answer.read()
        await answer.content.readany()
        seconds = time.perf_counter() - began
        await answer.read()
    return seconds


async def measured(direct: str, proxy: str, streamed: bool) -> list[dict[str, float]]:
    """Of each round, milliseconds."""
    async with aiohttp.ClientSession() as client:
        for _ in range(WARM):
            await once(client, direct, streamed)
            await once(client, proxy, streamed)
        return [await one_round(client, direct, proxy, streamed) for _ in range(ROUNDS)]


async def one_round(
    client: aiohttp.ClientSession, direct: str, proxy: str, streamed: bool
) -> dict[str, float]:
    """Percentiles of both, and what is between them."""
    seconds: dict[str, list[float]] = {direct: [], proxy: []}
    for number in range(PAIRS):
        for url in (direct, proxy) if number % 2 else (proxy, direct):
            seconds[url].append(await once(client, url, streamed))
    found = {}
    for percent in (50, 99):
        plain, through = (float(np.percentile(seconds[url], percent)) for url in (direct, proxy))
        found[f"direct_p{percent}_ms"] = plain * 1e3
        found[f"proxy_p{percent}_ms"] = through * 1e3
        found[f"added_p{percent}_ms"] = (through - plain) * 1e3
    return found


def told(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Median, lowest and highest of the rounds."""
    return {
        key: [statistics.median(values), min(values), max(values)]
        for key in rounds[0]
        for values in [[one[key] for one in rounds]]
    }


async def ready(url: str) -> None:
    """Wait until the proxy has found its worker."""
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{url}/ready") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


def main() -> int:
    """Measure, print, and keep what was asked to be kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/route.json")
    arguments = parser.parse_args()
    with running(str(WORKER)) as worker:
        direct = f"http://127.0.0.1:{said(worker, '').strip()}"
        with running("-m", "equipoise", "route", "--workers", direct, "--port", "0") as child:
            proxy = said(child, "serving on").split()[3].rstrip(",")
            asyncio.run(ready(proxy))
            figures = {
                kind: told(asyncio.run(measured(direct, proxy, streamed)))
                for kind, streamed in KINDS.items()
            }
    for kind, found in figures.items():
        print(f"{kind}, {ROUNDS} rounds of {PAIRS} pairs: median (lowest to highest), ms")
        for key, (middle, low, high) in found.items():
            print(f"  {key:<16} {middle:7.3f} ({low:.3f} to {high:.3f})")
    if arguments.json:
        save("route", ["python", *sys.argv], figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
