"""What an endpoint picker costs per request, and what it loses when workers come and go.

    python benchmarks/picker.py
    python benchmarks/picker.py --quick     a tenth of the requests; nothing is kept

`equipoise picker`, a process of its own, serves 5,000 requests of a made-up Envoy in a closed loop:
8 workers of 32 slots, 32 requests that wait, answers of 50 tokens. Then the same while one worker
after another is killed and others are added to the list of endpoints. Twice: with answers of which
Envoy sends the end only, and with every chunk sent.

CPU is that of the picker's process, user and system, over the requests; health checks and reports
are in it. Nothing here is a latency: Envoy, workers and picker share the cores.

Writes benchmarks/results/picker.json; `python benchmarks/report.py` shows it.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from lib.envoy_load import Answers, Load, MadeUpWorker
from lib.results import Row, save, spread
from proxy import first_line_with, running
from report import show

WORKERS, SLOTS, WAITING, PACE = 8, 32, 32, 0.02
REQUESTS, TOKENS, ROUNDS = 5000, 50, 5
BODY = json.dumps({"model": "m", "prompt": "how long does it take? " * 80, "stream": True}).encode()
METRICS = {"waiting": "w", "running": "r", "tokens": "t", "generated": "generated", "interval": 0.5}
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Setup:
    """A picker, its workers, and the file that lists them."""

    file: Path
    workers: dict[str, MadeUpWorker]
    pid: int = 0

    def write_list(self) -> None:
        """The workers that are alive are the endpoints from now on."""
        alive = [one.address for one in self.workers.values() if one.alive]
        self.file.with_suffix(".new").write_text(
            json.dumps({"workers": [f"http://{address}" for address in alive]}), "utf-8"
        )
        self.file.with_suffix(".new").rename(self.file)

    async def add_worker(self) -> None:
        """One more, which is not in the list yet."""
        worker = MadeUpWorker(SLOTS, PACE)
        await worker.start()
        self.workers[worker.address] = worker

    def cpu_seconds(self) -> float:
        """Of the picker, so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK


@asynccontextmanager
async def picker(answers: Answers) -> AsyncIterator[tuple[Setup, Load]]:
    """Started, and ended behind it."""
    with tempfile.TemporaryDirectory() as folder:
        file, config = Path(folder) / "endpoints.yaml", Path(folder) / "picker.yaml"
        settings = {
            "endpoints_file": str(file),
            "slots": SLOTS,
            "port": 0,
            "health_port": 0,
            "metrics_port": 0,
            "health_interval": 0.2,
            **({"metrics": METRICS} if answers is Answers.ENDS else {"tokens": "chunks"}),
        }
        config.write_text(json.dumps(settings), "utf-8")  # JSON is YAML
        setup = Setup(file, {})
        for _ in range(WORKERS):
            await setup.add_worker()
        setup.write_list()
        with running("-m", "equipoise", "picker", "--config", str(config)) as child:
            line = await asyncio.to_thread(first_line_with, child, "picking on port")
            port = int(line.split("picking on port")[1].split()[0])
            # What it logs later has to go somewhere.
            drained = asyncio.create_task(asyncio.to_thread(lambda: [*(child.stdout or ())]))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                setup.pid = child.pid
                await asyncio.sleep(2.0)  # until every worker was found to serve
                yield setup, Load(channel, answers, setup.workers)
            child.terminate()
            child.wait(timeout=60)
            await drained
        for one in setup.workers.values():
            if one.alive:
                await one.kill()


async def serve(setup: Setup, load: Load, requests: int, tokens: int) -> float:
    """Milliseconds of the picker's CPU per request."""
    todo = iter(range(requests))
    before = setup.cpu_seconds()

    async def client() -> None:
        for _ in todo:
            await load.send(BODY, tokens)

    await asyncio.gather(*(client() for _ in range(WORKERS * SLOTS + WAITING)))
    return (setup.cpu_seconds() - before) / requests * 1000


async def lose_and_add(setup: Setup) -> None:
    """A worker is killed, and another one comes; again and again, until cancelled."""
    while True:
        await asyncio.sleep(0.7)
        victim = next(one for one in setup.workers.values() if one.alive)
        await victim.kill()
        await setup.add_worker()
        await asyncio.sleep(0.7)
        setup.write_list()


async def measure(answers: Answers, requests: int, rounds: int) -> Row:
    """All figures of one way to tell of answers."""
    async with picker(answers) as (setup, load):
        await serve(setup, load, requests // 10, TOKENS)
        whole = [await serve(setup, load, requests, TOKENS) for _ in range(rounds)]
        short = [await serve(setup, load, requests, 2) for _ in range(rounds)]
        assert set(load.outcomes) == {"complete"}, load.outcomes
        most = max(one.most_running for one in setup.workers.values())
        load.outcomes.clear()
        chaos = asyncio.create_task(lose_and_add(setup))
        await serve(setup, load, requests, TOKENS)
        chaos.cancel()
        outcomes = load.outcomes
        workers = len(setup.workers)
    return {
        "answers": answers.name.lower(),
        "cpu_ms": spread(whole),
        "cpu_ms_short": spread(short),
        "cpu_us_per_token": 1000 * (spread(whole)[0] - spread(short)[0]) / (TOKENS - 2),
        "most_at_a_worker": most,
        "killed": workers - WORKERS,
        "complete": outcomes["complete"],
        "broken": outcomes["broken off after a token"],
        "lost": outcomes["lost without a token"],
        "refused": outcomes["refused by the picker"],
    }


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests; nothing is kept")
    quick = parser.parse_args().quick
    requests, rounds = (REQUESTS // 10, 1) if quick else (REQUESTS, ROUNDS)
    rows = [asyncio.run(measure(answers, requests, rounds)) for answers in Answers]
    ends = rows[0]
    figures: Row = {
        "cpu_ms": ends["cpu_ms"],
        "cpu_us_per_token": ends["cpu_us_per_token"],
        "lost": sum(row["lost"] + row["refused"] for row in rows),
    }
    show("picker", figures, {"answers": rows})
    if not quick:
        save("picker", ["python", "benchmarks/picker.py"], figures, {"answers": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
