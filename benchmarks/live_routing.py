"""Whether what was simulated is what runs: imbalance behind the real proxy and in the simulator.

    python benchmarks/live_routing.py
    python benchmarks/live_routing.py --quick     one seed; nothing is kept

`equipoise route`, in front of eight workers in lockstep with 16 slots each, serves a closed loop of
clients, four waiting for each worker: the workload `prop` with a twentieth of its output tokens, so
that a run takes a minute. Each request is a real stream of server-sent events; the tokens of a step
reach the proxy over half of its time, worker by worker. `equipoise simulate` serves the same
requests. Imbalance is workers x largest - sum of the workers' KV tokens, mean over the steps with
at least nine of ten slots taken, without the first and the last of them: workers fill up, and run
empty.

Clients, proxy and workers are a process each. Nothing here is a speed, but a machine that does
other things may take longer for a step than it should.

Writes benchmarks/results/live_routing.json; `python benchmarks/report.py` shows it.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
from lib.results import Row, save, spread
from proxy import first_line_with, ready, running
from report import show

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings, WhenFull
from equipoise.balancer.requests.simulation import (
    BACKLOG_PER_WORKER,
    SaturatedArrivals,
    Scenario,
    simulate,
)
from equipoise.balancer.requests.workload import Workload
from equipoise.balancer.requests.workload_generators import generate

WORKERS, SLOTS, REQUESTS, SHORTER = 8, 16, 1000, 20
STEP_SECONDS, SPREAD_SECONDS = 0.1, 0.05
BUSY, EDGE = 0.9, 0.15
"""Part of the slots that is taken in the steps that count, and how many of these do not, at either
end, as a part of them."""
POLICIES = "fit", "br0"
"""Those that choose: what `jsq_load` leaves varies by half from one order of arrival to another."""
SEEDS = 11, 12, 13
LOCKSTEP = str(Path(__file__).parent / "lib" / "lockstep_workers.py")


def requests_of(seed: int) -> Workload:
    """The requests of a run."""
    drawn = generate("prop", REQUESTS, seed)
    return replace(drawn, outputs=np.maximum(drawn.outputs // SHORTER, 1))


def imbalance(loads: npt.NDArray[np.int64], active: npt.NDArray[np.int64]) -> float:
    """Mean of busy steps, in thousand tokens; loads [steps, workers]."""
    busy = loads[active[: len(loads)] >= BUSY * WORKERS * SLOTS]
    edge = round(EDGE * len(busy))
    counted = busy[edge : len(busy) - edge]
    return float((WORKERS * counted.max(axis=1) - counted.sum(axis=1)).mean() / 1000)


def simulated(name: str, workload: Workload, seed: int) -> float:
    """What the simulator says."""
    scenario = Scenario(
        cluster=Cluster(workers=WORKERS, slots=SLOTS),
        policy=RoutingPolicySettings(name=name, when_full=WhenFull.HOLD),
        arrivals=SaturatedArrivals(),
        trajectory=1 << 20,
        seed=seed,
    )
    steps = simulate(workload, scenario).steps
    return imbalance(steps.loads, steps.active)


def live(name: str, workload: Workload) -> float:
    """What the workers saw behind the proxy."""
    numbers = (WORKERS, SLOTS, STEP_SECONDS, SPREAD_SECONDS)
    with (
        running(LOCKSTEP, *map(str, numbers)) as workers,
        tempfile.TemporaryDirectory() as folder,
    ):
        urls = [f"http://127.0.0.1:{port}" for port in json.loads(first_line_with(workers, "["))]
        config = Path(folder) / "route.yaml"
        settings = {"workers": urls, "slots": SLOTS, "policy": name, "port": 0}
        config.write_text(json.dumps(settings), "utf-8")  # JSON is YAML
        with running("-m", "equipoise", "route", "--config", str(config)) as proxy:
            url = first_line_with(proxy, "serving on").split()[3].rstrip(",")
            steps = asyncio.run(serve(url, urls[0], workload))
    loads, active = zip(*steps, strict=True)
    return imbalance(np.array(loads), np.array(active))


async def serve(proxy: str, worker: str, workload: Workload) -> Sequence[tuple[list[int], int]]:
    """Send all requests; what every step of the workers was."""
    await ready(proxy)
    todo = iter(zip(workload.prompts.tolist(), workload.outputs.tolist(), strict=True))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        clients = WORKERS * (SLOTS + BACKLOG_PER_WORKER)
        await asyncio.gather(*(one_client(client, proxy, todo) for _ in range(clients)))
        async with client.get(f"{worker}/steps") as answer:
            steps: list[tuple[list[int], int]] = await answer.json()
            return steps


async def one_client(client: aiohttp.ClientSession, proxy: str, todo: Any) -> None:
    """Send the next request when the one before has ended, and count its tokens."""
    for prompt, output in todo:
        body = {"model": "m", "prompt": [0] * prompt, "max_tokens": output, "stream": True}
        async with client.post(f"{proxy}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.read()
            text = await answer.read()
        assert text.count(b"token") == output, (text[-200:], output)


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is kept")
    quick = parser.parse_args().quick
    rows: list[Row] = []
    figures: Row = {}
    for name in POLICIES:
        pairs = []
        for seed in SEEDS[:1] if quick else SEEDS:
            workload = requests_of(seed)
            pairs.append((live(name, workload), simulated(name, workload, seed)))
        # Of the sums: in a minute one seed differs from another by a third, and so do two orders
        # in which the same requests arrive.
        ratio = sum(measured for measured, _ in pairs) / sum(expected for _, expected in pairs)
        rows.append(
            {
                "policy": name,
                "live": spread(measured for measured, _ in pairs),
                "simulated": spread(expected for _, expected in pairs),
                "ratio": ratio,
            }
        )
        figures[name] = ratio
    show("live_routing", figures, {"policies": rows})
    if not quick:
        command = ["python", "benchmarks/live_routing.py"]
        save("live_routing", command, figures, {"policies": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
