"""One stage of `pipeline.py`, as a process: serves every run in turn, and writes down when.

Told what to do on standard input, in JSON; writes a line of JSON that says what the link is, and
one for each run.
"""

import ctypes
import gc
import json
import signal
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from emulated_device import prompt_timers
from handover import Station
from handovers import CONTESTANTS
from link_delayed import DelayedFabric
from link_gauge import Gauge
from link_place import Asked
from pipeline_emulation import in_flight, message_bytes
from pipeline_work import Work, work_of
from torch import distributed
from wire import GlooWires, HalWires, Wires

from equipoise.hal import registry
from equipoise.hal.communicator import Fabric, Rendezvous

PR_SET_PDEATHSIG = 1


class Rank:
    """What lasts for all runs.

    Args:
        where: to meet the others.
        delay: of every message, where the link is a delay in the HAL.
    """

    def __init__(self, where: Rendezvous, delay: Asked | None) -> None:
        self.where = where
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            where.host, where.port, None, False, timedelta(seconds=where.deadline)
        )
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore("others", store),  # type: ignore[attr-defined]
            rank=where.rank,
            world_size=where.size,
            timeout=timedelta(seconds=where.deadline),
        )
        self._fabric: Fabric = registry.communicator("gloo").connect(where)
        self._wires: Wires = GlooWires(where.deadline)
        if delay is not None:
            held_back = DelayedFabric(self._fabric, delay, where.deadline)
            self._fabric = held_back  # type: ignore[assignment]
            self._wires = HalWires(self._fabric, where.deadline)
        self._accelerator = registry.accelerator("cpu").open(0)
        self._turns = self._fabric.open("turns")

    def gauge(self, sizes: Iterable[int]) -> dict[str, Any]:
        """What the link is: latency, rate, and seconds of messages of these sizes, by size.

        Every rank is told what the first one has measured.
        """
        wire = self._wires.open("gauge")
        told: list[dict[str, Any]] = [{}]
        if self.where.rank < 2:
            gauge = Gauge(wire, self.where.rank)
            link = gauge.link()
            told = [{**link.fields(), "seconds": [[n, gauge.transfer(n)] for n in sizes]}]
        distributed.broadcast_object_list(told, src=0)
        return told[0]

    def run(self, work: Work, system: str, label: str, seconds: dict[int, float]) -> dict[str, Any]:
        """Serve one run."""
        batches = work.batches(seconds, in_flight(self.where.size))
        station = Station(
            rank=self.where.rank,
            ranks=self.where.size,
            wires=self._wires,
            fabric=self._fabric,
            accelerator=self._accelerator,
            hidden=work.hidden,
            most=max(batch.rows for batch in batches),
            label=label,
            deadline=self.where.deadline,
        )
        stage = CONTESTANTS[system](station)
        gc.collect()
        gc.freeze()
        self._turns.barrier().result(self.where.deadline)
        try:
            stage.run(batches)
        finally:
            gc.unfreeze()
        return {
            "began": stage.began,
            "ended": stage.ended,
            "wrong": stage.wrong,
            "messages": stage.messages,
            "cpu": stage.cpu,
            "compute": max(batch.seconds for batch in batches),
        }

    def close(self) -> None:
        """Leave together."""
        self._turns.barrier().result(self.where.deadline)
        self._fabric.close()
        self._accelerator.close()
        distributed.destroy_process_group()


def serve(task: dict[str, Any], told: IO[str]) -> None:
    """Every run of a task; a line for each."""
    torch.set_num_threads(1)
    prompt_timers()
    delay = Asked(**task["delay"]) if task["delay"] else None
    rank = Rank(Rendezvous(**task["where"]), delay)
    works = [work_of(fields) for fields, _, _ in task["runs"]]
    sizes = sorted({message_bytes(w.hidden, w.gauged) for w in works})
    link = rank.gauge(sizes)
    told.write(json.dumps(link) + "\n")
    seconds = dict(link["seconds"])
    for number, (work, (_, system, turn)) in enumerate(zip(works, task["runs"], strict=True)):
        found = rank.run(work, system, f"run{number}", seconds)
        told.write(json.dumps({"system": system, "round": turn, **found}) + "\n")
        told.flush()
    rank.close()


def main() -> None:
    """Serve what is asked for on standard input; the process that started this one is survived by
    nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    task = json.loads(sys.stdin.readline())
    with Path(task["told"]).open("w") as told:
        serve(task, told)


if __name__ == "__main__":
    main()
