"""Every contestant serves rightly on every kind of link, and nothing of a link is left behind."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.hal.capabilities import Unavailable
from equipoise.hal.errors import BackendUnavailable

pytestmark = pytest.mark.ranks
BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SECONDS, POLL = 90.0, 0.02
sys.path.insert(0, str(BENCHMARKS))
try:
    benchmark, crew, emulation, figures, link_place, link_tun, requests, work = (
        importlib.import_module(name)
        for name in (
            "pipeline",
            "pipeline_crew",
            "pipeline_emulation",
            "pipeline_figures",
            "link_place",
            "link_tun",
            "pipeline_requests",
            "pipeline_work",
        )
    )
finally:
    sys.path.remove(str(BENCHMARKS))
ASKED = link_place.Asked(latency=0.5e-3, rate=200e6)
SERVING = requests.Serving(hidden=256, prompt=8, decode=3, concurrency=6, requests=9, ratio=0.5)
SERVER = """
import socket
listener = socket.create_server(("", 4242))
print("ready", flush=True)
connection, _ = listener.accept()
while data := connection.recv(1 << 20):
    connection.sendall(data)
"""
CLIENT = """
import hashlib, os, socket, sys, threading
connection = socket.create_connection((sys.argv[1], 4242), timeout=30)
sent = os.urandom(3_000_001)
threading.Thread(target=connection.sendall, args=(sent,)).start()
came = bytearray()
while len(came) < len(sent):
    came += connection.recv(1 << 20)
print(bytes(came) == sent)
"""
HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from link_place import Asked
from link_tun import tun
with tun(1, Asked(1e-3, 1e8)) as link:
    print(link.places[0].parts[2], flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def permitted() -> None:
    """Root, /dev/net/tun, namespaces and a compiler."""
    found = link_tun.probe()
    if isinstance(found, Unavailable):
        pytest.skip(f"no emulated link here: {found.reason}")


@pytest.fixture(scope="module")
def tun(permitted: None) -> Iterator[Any]:
    """Two members on an emulated link."""
    with link_tun.tun(2, ASKED) as link:
        yield link


def served(link: Any, stages: int) -> Any:
    """Figures of every contestant; raises where a word was wrong."""
    works = (work.Steady(emulation.Point(256, 8, 1.0)), SERVING)
    runs = [crew.Run(one, name, 0) for one in works for name in figures.CONTESTANTS]
    told = crew.serve_all(link, stages, runs, SECONDS)
    return told, figures.link_figures(runs, told, stages)


def is_whole(told: Any, found: Any) -> bool:
    """Whether all was measured, by every contestant."""
    names = list(figures.CONTESTANTS)
    parts = [*found["points"], *found["serving"]]
    return told.link["latency"] > 0.0 and [list(part["systems"]) for part in parts] == [names] * 2


@pytest.mark.parametrize("link", ["loopback", "delayed"])
def test_contestants_serve_rightly_where_no_permission_is_needed(link: str) -> None:
    with benchmark.LINKS[link](2) as made:
        assert is_whole(*served(made, 2))


@pytest.mark.usefixtures("permitted")
def test_contestants_serve_rightly_on_the_emulated_link() -> None:
    with link_tun.tun(3, ASKED) as link:
        told, found = served(link, 3)
    assert is_whole(told, found)
    assert told.link["latency"] >= ASKED.latency
    assert told.link["rate"] <= ASKED.rate


def echoed(link: Any) -> str:
    """Whether three megabytes come back as they went, said by the one who sent them."""
    run = [[*link.place(rank).prefix, sys.executable, "-c"] for rank in range(2)]
    server = subprocess.Popen([*run[0], SERVER], stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = [*run[1], CLIENT, link_tun.address(0)]
        done = subprocess.run(client, capture_output=True, text=True, timeout=240, check=False)
        server.kill()
    return done.stdout + done.stderr


def test_bytes_arrive_as_they_were_sent(tun: Any) -> None:
    assert echoed(tun) == "True\n"


@pytest.mark.usefixtures("permitted")
def test_a_forwarder_that_changes_a_byte_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    healthy, line = link_tun.SOURCE.read_text(), "Packet& first = source.under_way.front();"
    source = tmp_path / "forwarder.cpp"
    source.write_text(
        healthy.replace(line, f"{line} if (first.bytes.size() > 1000) first.bytes.back() ^= 1;")
    )
    assert source.read_text() != healthy
    monkeypatch.setattr(link_tun, "SOURCE", source)
    with link_tun.tun(2, ASKED) as link:
        assert echoed(link) == "False\n"


def test_a_member_sees_the_link_and_nothing_else(tun: Any) -> None:
    command = [*tun.place(1).prefix, "cat", "/proc/net/dev"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    devices = {line.partition(":")[0].strip() for line in done.stdout.splitlines()[2:]}
    assert devices == {"lo", link_tun.INTERFACE}
    assert link_tun.INTERFACE not in Path("/proc/net/dev").read_text()


def children(process: int) -> list[int]:
    """Of a process, as the kernel has them."""
    told = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(number) for number in told.split()]


@pytest.mark.usefixtures("permitted")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_link_whose_launcher_is_ended(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLDER, str(BENCHMARKS)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as holder:
        assert holder.stdout is not None
        forwarder = int(holder.stdout.readline())
        held = children(holder.pid)
        assert forwarder in held
        holder.send_signal(number)
        expires = time.monotonic() + 200.0
        while any(map(alive, held)) and time.monotonic() < expires:
            time.sleep(POLL)
        assert not any(map(alive, held))
    assert list(tmp_path.iterdir()) == []


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "pipeline.py"), "--quick", "--link", "loopback"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as launcher:
        expires = time.monotonic() + SECONDS
        while len(list(tmp_path.glob("*/rank?"))) < 2 and time.monotonic() < expires:
            time.sleep(POLL)
        held = children(launcher.pid)
        launcher.kill()
        expires = time.monotonic() + 200.0
        while any(map(alive, held)) and time.monotonic() < expires:
            time.sleep(POLL)
    assert len(held) == 2
    assert not any(map(alive, held))


@pytest.mark.usefixtures("permitted")
def test_a_failure_within_leaves_nothing() -> None:
    before, within = set(children(os.getpid())), set[int]()

    def fail() -> None:
        with link_tun.tun(2, ASKED):
            within.update(children(os.getpid()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(within - before) == 2
    assert set(children(os.getpid())) == before


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert link_tun.probe() == Unavailable("there is no no-such-compiler")
    monkeypatch.setattr(link_tun, "TUN", Path("/no/such/device"))
    monkeypatch.setenv("CXX", "true")
    assert link_tun.probe() == Unavailable("/no/such/device cannot be opened")


@pytest.mark.usefixtures("permitted")
def test_a_forwarder_that_ends_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "forwarder.cpp"
    source.write_text('#include <cstdio>\nint main() { std::fputs("no permission", stderr); }\n')
    monkeypatch.setattr(link_tun, "SOURCE", source)
    with pytest.raises(BackendUnavailable, match="no permission"), link_tun.tun(1, ASKED):
        pass
    assert link_tun.probe() == Unavailable("no permission")


def test_where_no_link_can_be_made_a_delay_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "probe", lambda: Unavailable("not permitted"))
    assert [benchmark.permitted(link) for link in ("loopback", "emulated")] == [
        "loopback",
        "delayed",
    ]
    assert capsys.readouterr().err == (
        "no emulated link here, so a delay in the HAL: not permitted\n"
    )


def test_a_rank_that_fails_ends_all_and_is_quoted() -> None:
    runs = [crew.Run(work.Steady(emulation.Point(256, 8, 1.0)), "nobody", 0)]
    with (
        benchmark.LINKS["loopback"](2) as link,
        pytest.raises(RuntimeError, match="KeyError: 'nobody'"),
    ):
        crew.serve_all(link, 2, runs, SECONDS)
