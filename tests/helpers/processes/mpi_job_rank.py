"""One rank of a job: JSON lines from and to the driver's socket, as in `worker.py`."""

import faulthandler
import json
import socket
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from helpers.processes.rank_process import CaseServer

from equipoise.hal import registry


def main(driver: str) -> None:
    """Serve until the driver hangs up, then end as any program does."""
    faulthandler.enable()
    torch.set_num_threads(1)
    backend = registry.communicator("mpi")
    where = backend.launcher_rendezvous()
    assert where is not None
    server = CaseServer()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(driver)
        words = link.makefile("rw", encoding="utf-8")
        answer: dict[str, Any] = {"rank": where.rank}
        while True:
            words.write(json.dumps(answer) + "\n")
            words.flush()
            line = words.readline()
            if not line:
                return
            order = json.loads(line)
            if "case" in order:
                member = backend.launcher_rendezvous()
                assert member is not None
                member = replace(member, deadline=order["deadline"])
                order = {**order, "communicator": "mpi", "where": asdict(member)}
            answer = server.answer(order)


if __name__ == "__main__":
    main(sys.argv[1])
