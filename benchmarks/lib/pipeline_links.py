"""Links between the stages of `pipeline.py`: where ranks run, and where they meet.

One is the loopback interface. The other has a latency and a rate: ranks in network namespaces,
joined by a process of our own. `forwarder.cpp` makes the namespaces and holds all packets until
they are due. Nothing of it has a name that others could see or that could be left behind: a
namespace is reached through the forwarder's descriptors, and is gone with the last process in it,
also after a kill.
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

from equipoise.hal import registry
from equipoise.hal.capabilities import Available, Probe, Unavailable
from equipoise.hal.errors import BackendUnavailable
from lib.processes import Place


@dataclass(frozen=True)
class LinkSettings:
    """What a link is asked to be; what it is, is measured.

    Attributes:
        latency: seconds, one way, of a message without bytes.
        rate: bytes per second that leave a rank; directions do not share it.
    """

    latency: float
    rate: float


@dataclass(frozen=True)
class Link:
    """A link that is there, for one group of ranks: ranks meet at its store once.

    Attributes:
        name: in tables.
        settings: what it was asked to be; None: whatever this machine has.
        store: host and port of the rendezvous, as a rank reaches it.
        places: where each rank runs.
    """

    name: str
    settings: LinkSettings | None
    store: tuple[str, int]
    places: tuple[Place, ...]


@contextmanager
def loopback(ranks: int) -> Iterator[Link]:
    """The loopback interface of this machine."""
    host = registry.communicator("gloo").host()
    place = Place(environment={"GLOO_SOCKET_IFNAME": "lo"})
    try:
        yield Link("loopback", None, host.address, (place,) * ranks)
    finally:
        host.close()


HERE = Path(__file__).parent
SOURCE, STORE_SCRIPT = HERE / "forwarder.cpp", HERE / "link_store.py"
TUN_INTERFACE, NETWORK = "link0", "10.77.0."
"""The forwarder's."""
ENTER = "nsenter"
TUN = Path("/dev/net/tun")
BUILD, GRACE = 120.0, 10.0
"""Seconds for the compiler; seconds in which a process ends that nobody wants any more."""


def inside(namespace: Path) -> Place:
    """A process in a network namespace; gloo takes the link instead of the host's own name."""
    return Place((ENTER, f"--net={namespace}"), {"GLOO_SOCKET_IFNAME": TUN_INTERFACE})


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
        with forwarder(1, LinkSettings(0.0, 1e9)) as places:
            here = [ENTER, f"--net={places[0]}", "true"]
            result = subprocess.run(
                here, capture_output=True, text=True, timeout=GRACE, check=False
            )
    except BackendUnavailable as error:
        return Unavailable(str(error))
    if result.returncode:
        return Unavailable(f"a namespace cannot be entered: {result.stderr.strip()}")
    return Available("TUN devices in network namespaces")


@contextmanager
def tun(ranks: int, settings: LinkSettings) -> Iterator[Link]:
    """Make the link; behind it nothing of it is left.

    Raises:
        BackendUnavailable: it cannot be made here; says why.
    """
    with forwarder(ranks + 1, settings) as places:
        place, store = inside(places[ranks]), address(ranks)
        holder = [*place.prefix, sys.executable, str(STORE_SCRIPT), store]
        with _running(holder) as process:
            port = int(_first_lines(process, 1)[0])
            yield Link("emulated link", settings, (store, port), tuple(map(inside, places[:ranks])))


@contextmanager
def forwarder(members: int, settings: LinkSettings) -> Iterator[tuple[Path, ...]]:
    """Namespaces on a link, one a member. Raises `BackendUnavailable`."""
    words = [str(members), str(round(settings.latency * 1e9)), str(settings.rate)]
    with ExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="equipoise-link-") as folder:
            command = [str(_compiled(Path(folder))), *words]
            process = stack.enter_context(_running(command))
            descriptors = _first_lines(process, members)
        # It runs on without its file, so that a kill from here on leaves none behind.
        yield tuple(Path(f"/proc/{process.pid}/fd/{number}") for number in descriptors)


def _compiled(folder: Path) -> Path:
    program = folder / "forwarder"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-O2", "-o", str(program), str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD, check=False)
    if result.returncode:
        raise BackendUnavailable(f"{compiler} cannot build the forwarder: {_last(result.stderr)}")
    return program


@contextmanager
def _running(command: Sequence[str]) -> "Iterator[subprocess.Popen[str]]":
    """A process that ends when its standard input does."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        _end_process(process)


def _end_process(process: "subprocess.Popen[str]") -> None:
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


def _first_lines(process: "subprocess.Popen[str]", count: int) -> list[str]:
    """What it prints when it is ready."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stdout.readline().strip() for _ in range(count)]
    if not all(lines):
        process.kill()
        errors = process.stderr.read()
        raise BackendUnavailable(_last(errors) or "it ended without a word")
    return lines


def _last(text: str) -> str:
    """Its last line."""
    return "".join(text.strip().splitlines()[-1:])
