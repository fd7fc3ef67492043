"""A link with a latency and a rate: ranks in network namespaces, joined by a process of our own.

`link/forwarder.cpp` makes the namespaces and holds all packets until they are due. Nothing of it
has a name that others could see or that could be left behind: a namespace is reached through the
forwarder's descriptors, and is gone with the last process in it, also after a kill.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from link_place import Asked, Place

from equipoise.hal.capabilities import Available, Probe, Unavailable
from equipoise.hal.errors import BackendUnavailable

HERE = Path(__file__).parent
SOURCE, STORE = HERE / "link" / "forwarder.cpp", HERE / "link_store.py"
INTERFACE, NETWORK = "link0", "10.77.0."
"""The forwarder's."""
ENTER = "nsenter"
TUN = Path("/dev/net/tun")
BUILD, GRACE = 120.0, 10.0
"""Seconds for the compiler; seconds in which a process ends that nobody wants any more."""


@dataclass(frozen=True)
class Tun:
    """Ranks in namespaces of their own. See `Link`."""

    name: str
    asked: Asked
    store: tuple[str, int]
    places: tuple[Path, ...]
    delay: None = None

    def place(self, rank: int) -> Place:
        """See `Link`."""
        return inside(self.places[rank])


def inside(namespace: Path) -> Place:
    """A process in a network namespace; gloo takes the link instead of the host's own name."""
    return Place((ENTER, f"--net={namespace}"), {"GLOO_SOCKET_IFNAME": INTERFACE})


def address(member: int) -> str:
    """Of a member on the link."""
    return f"{NETWORK}{member + 1}"


def probe() -> Probe:
    """Whether such a link can be made here."""
    compiler = os.environ.get("CXX", "c++")
    for tool in (compiler, ENTER):
        if shutil.which(tool) is None:
            return Unavailable(f"there is no {tool}")
    if not os.access(TUN, os.R_OK | os.W_OK):
        return Unavailable(f"{TUN} cannot be opened")
    try:
        with forwarder(1, Asked(0.0, 1e9)) as places:
            here = [ENTER, f"--net={places[0]}", "true"]
            done = subprocess.run(here, capture_output=True, text=True, timeout=GRACE, check=False)
    except BackendUnavailable as error:
        return Unavailable(str(error))
    if done.returncode:
        return Unavailable(f"a namespace cannot be entered: {done.stderr.strip()}")
    return Available("TUN devices in network namespaces")


@contextmanager
def tun(ranks: int, asked: Asked) -> Iterator[Tun]:
    """Make the link; behind it nothing of it is left.

    Raises:
        BackendUnavailable: it cannot be made here; says why.
    """
    with forwarder(ranks + 1, asked) as places:
        place, store = inside(places[ranks]), address(ranks)
        holder = [*place.prefix, sys.executable, str(STORE), store]
        with _running(holder) as process:
            port = int(_lines(process, 1)[0])
            yield Tun("emulated link", asked, (store, port), places[:ranks])


@contextmanager
def forwarder(members: int, asked: Asked) -> Iterator[tuple[Path, ...]]:
    """Namespaces on a link, one a member. Raises `BackendUnavailable`."""
    words = [str(members), str(round(asked.latency * 1e9)), str(asked.rate)]
    with ExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="equipoise-link-") as folder:
            command = [str(_compiled(Path(folder))), *words]
            process = stack.enter_context(_running(command))
            descriptors = _lines(process, members)
        # It runs on without its file, so that a kill from here on leaves none behind.
        yield tuple(Path(f"/proc/{process.pid}/fd/{number}") for number in descriptors)


def _compiled(folder: Path) -> Path:
    program = folder / "forwarder"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-O2", "-o", str(program), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD, check=False)
    if done.returncode:
        raise BackendUnavailable(f"{compiler} cannot build the forwarder: {_last(done.stderr)}")
    return program


@contextmanager
def _running(command: Sequence[str]) -> "Iterator[subprocess.Popen[str]]":
    """A process that ends when its standard input does."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    with process:  # closes its ends of all pipes, and waits
        assert process.stdin is not None
        try:
            process.stdin.close()
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        except BaseException:
            process.kill()
            raise


def _lines(process: "subprocess.Popen[str]", count: int) -> list[str]:
    """What it prints when it is ready."""
    assert process.stdout is not None
    assert process.stderr is not None
    found = [process.stdout.readline().strip() for _ in range(count)]
    if not all(found):
        process.kill()
        errors = process.stderr.read()
        raise BackendUnavailable(_last(errors) or "it ended without a word")
    return found


def _last(text: str) -> str:
    """Its last line."""
    return "".join(text.strip().splitlines()[-1:])
