"""A communicator with a launcher of its own, and one rank of such a launch.

As a program, `BACKEND` is read from the environment: rank 0 plays properties and prints what it
found as JSON, the others serve.
"""

import json
import os
import sys
from dataclasses import asdict

from processes.conformance import planted_properties as planted

from equipoise.backends.cpu.gloo import GlooBackend
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.conformance.executors import multi_rank
from equipoise.hal.conformance.executors.launched import LaunchedSubject, serve_rank
from equipoise.hal.conformance.properties.faults import FAULTS
from equipoise.hal.conformance.search import SearchSettings, search

NAME = "processes.conformance.launched_rank:JOINED"
PLACE = "EQUIPOISE_TEST_PLACE"
"""The rendezvous of this process: a `Rendezvous` as JSON."""


class JoinedBackend(GlooBackend):
    """Gloo whose ranks were started by a launcher."""

    name = "joined"

    def launcher_rendezvous(self) -> Rendezvous | None:
        return Rendezvous(**json.loads(os.environ[PLACE]))


JOINED = JoinedBackend()


def play(subject: LaunchedSubject) -> dict[str, object]:
    """What each of some properties ends with, in this order."""
    efforts = {
        planted.SOUND: SearchSettings(cases=6),
        planted.WRONG: SearchSettings(cases=30),
        planted.RAISING: SearchSettings(cases=2, max_shrinks=0),
        planted.HANGING: SearchSettings(cases=1, max_shrinks=0),
        planted.PIDS: SearchSettings(cases=1),
        FAULTS: SearchSettings(cases=5),
    }
    replies: dict[str, object] = {"sizes": subject.traits.group_sizes}
    patient = multi_rank.WATCHDOG
    for prop, effort in efforts.items():
        # Short only where it is to expire: a busy machine may be slow to answer everything else.
        multi_rank.WATCHDOG = 4.0 if prop is planted.HANGING else patient
        verdict = search(prop, subject, effort)
        replies[prop.name] = type(verdict).__name__, getattr(verdict, "what", "")
    replies["processes"] = planted.JUDGED_ANSWERS[-1]
    return replies


def main() -> None:
    """Be one rank."""
    where = JOINED.launcher_rendezvous()
    assert where is not None
    if where.rank != 0:
        serve_rank("cpu", NAME, where)
        return
    subject = LaunchedSubject("cpu", NAME, where)
    print(json.dumps(play(subject)))
    subject.close()


def place(rank: int, size: int, address: tuple[str, int]) -> str:
    """What to put into the environment."""
    host, port = address
    return json.dumps(asdict(Rendezvous(rank=rank, size=size, host=host, port=port, deadline=20.0)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a hanging call is still in a thread
