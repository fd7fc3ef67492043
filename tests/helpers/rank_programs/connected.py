"""What a process does that a launcher started: `python -m helpers.rank_programs.connected WHAT`."""

import os
import signal
import sys
from collections.abc import Callable

import torch
from torch import distributed

import equipoise
from equipoise.hal.errors import RankLost


def total(ranks: equipoise.Connection, purpose: str) -> int:
    """The sum of all ranks' numbers, counted from 1."""
    value = torch.tensor([ranks.rank + 1])
    ranks.fabric.open(purpose).all_reduce(value).result(ranks.deadline)
    return int(value)


def twice() -> None:
    """Connect two times: what the first run asked is not there for the second."""
    for number in range(2):
        with equipoise.connect() as ranks:
            ranks.barrier()
            say(f"run {number}: rank {ranks.rank} of {ranks.size}, sum {total(ranks, 'sum')}")


def restarted() -> None:
    """The first attempt loses rank 1, the second must not believe that it is lost."""
    with equipoise.connect() as ranks:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            ranks.barrier()
            raise SystemExit(3)
        say(f"rank {ranks.rank} of {ranks.size}, sum {total(ranks, 'sum')}")
        lost_rank = ranks.fabric.control.lost_rank(0.0)
        say(f"lost: {lost_rank}")


def within_torch() -> None:
    """A group of torch's own is made before and after, from the same variables."""
    distributed.init_process_group("gloo")
    with equipoise.connect() as ranks:
        sum_of_ours = total(ranks, "sum")
        sum_of_torch = torch.tensor([ranks.rank + 1])
        distributed.all_reduce(sum_of_torch)
        say(f"sums {sum_of_ours} and {int(sum_of_torch)}")
    distributed.barrier()
    distributed.destroy_process_group()


def before_torch() -> None:
    """The other way round: torch finds the store that rank 0 holds for us."""
    with equipoise.connect() as ranks:
        distributed.init_process_group("gloo")
        say(f"rank {distributed.get_rank()} of {distributed.get_world_size()}, {ranks.size} ranks")
        distributed.destroy_process_group()


def killed() -> None:
    """Rank 1 dies; rank 0, which holds the store, names it."""
    try:
        with equipoise.connect(deadline=20.0) as ranks:
            ranks.barrier()
            if ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.barrier()
    except RankLost as error:
        say(str(error))
        sys.stdout.flush()
        os._exit(0)


def raising() -> None:
    """Rank 1 raises; rank 0 learns why."""
    try:
        with equipoise.connect(deadline=20.0) as ranks:
            ranks.barrier()
            if ranks.rank == 1:
                raise ValueError("no such checkpoint")
    except (RankLost, ValueError) as error:
        say(f"{type(error).__name__}: {error}")


def over_mpi() -> None:
    """Ranks that mpiexec started."""
    with equipoise.connect(communicator="mpi") as ranks:
        ranks.barrier()
        say(f"rank {ranks.rank} of {ranks.size}, sum {total(ranks, 'sum')}")


def say(line: str) -> None:
    """One write: several ranks share the pipe."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    program: Callable[[], None] = globals()[sys.argv[1]]
    program()
