"""The process that rank processes are forked from: imports their module, forks on request.

A request is a kind and a process id over the socket that is its standard input, with the three
standard descriptors of the new process where one is to be forked. It imports no backend: what
those start or open at import might not survive a fork. Forked processes share what an interpreter
draws once, such as the seed of its hashes.
"""

import gc
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn, TypeAlias

from equipoise.hal.conformance.executors.worker_process import die_with_parent

RequestKind: TypeAlias = bytes
FORK: RequestKind = b"f"
"""Fork; the answer is the process id."""
WAIT: RequestKind = b"w"
"""Poll a fork; the answer is its exit status, or `RUNNING`."""
REQUEST = struct.Struct("!ci")
PID = struct.Struct("!i")
RUNNING = 1 << 20
"""Larger than any exit status."""
TASKS = "/proc/self/task"


def main() -> None:
    """Serve until the driver closes the socket. The command line: a module, its arguments."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it, and ends us
    import_module(sys.argv[1])
    # Freeze what was imported: garbage collections in forks then write to no shared page.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as driver:
        while True:
            line, descriptors, _, _ = socket.recv_fds(driver, REQUEST.size, 3)
            if not line:
                return
            kind, pid = REQUEST.unpack(line)
            answer = _poll_exit_status(pid) if kind == WAIT else _fork(driver, descriptors)
            driver.sendall(PID.pack(answer))


def _poll_exit_status(pid: int) -> int:
    exited_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if exited_pid else RUNNING


def _fork(driver: socket.socket, descriptors: Sequence[int]) -> int:
    """Fork, or start a new interpreter where an import has started threads, which a fork loses."""
    program = _run if len(os.listdir(TASKS)) == 1 else _exec
    pid = os.fork()
    if pid == 0:
        driver.close()
        _run_as_rank(program, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _run_as_rank(program: Callable[[Sequence[str]], None], descriptors: Sequence[int]) -> NoReturn:
    try:
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        program(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _run(command: Sequence[str]) -> None:
    sys.argv[:] = command
    import_module(command[0]).main()


def _exec(command: Sequence[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-P", "-m", *command])


if __name__ == "__main__":
    main()
