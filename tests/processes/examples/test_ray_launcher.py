"""The launcher on a cluster, with processes of this machine in place of Ray's."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import yaml
from helpers.fakes.fake_ray_cluster import EXAMPLES, main, part
from helpers.fakes.fake_server_process import PATIENCE, spawn
from helpers.harnesses.proxy_setup import CHAT, chat_request
from helpers.processes.ports import free_port

FAKE = (sys.executable, "-m", "helpers.fakes.fake_openai_server")
SERVED = (*FAKE, '{"name": "w{port}", "port": {port}, "pace": 0.01}')
UNWELL = (*FAKE, '{"name": "w", "port": {port}, "health": 503}')
DEAD = (sys.executable, "-c", "import sys; sys.exit('no weights for {node}:{port}')")
FRAIL = (sys.executable, "-u", "-c", """
import http.server, os, sys
class Answer(http.server.BaseHTTPRequestHandler):
    left = 6
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        Answer.left -= 1
        if not Answer.left:
            print('out of memory')
            os._exit(9)
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Answer).serve_forever()
""", "{port}")  # fmt: skip
"""Dies of the sixth question how it is: the first is the launcher's, the proxy asks the others."""


class Run:
    """One launcher, and what it wrote."""

    def __init__(self, folder: Path, units: str, *arguments: str, route: object = None) -> None:
        self.logs = folder / "logs"
        config = folder / "given.yaml"
        route_config = {"port": 0, "health_interval": 0.1} if route is None else route
        config.write_text(json.dumps(route_config))
        options = ("--logs", str(self.logs), "--route", str(config), *arguments)
        self.process = spawn("helpers.fakes.fake_ray_cluster", units, *options)

    @property
    def workers(self) -> list[str]:
        return [one["url"] for one in self.config["workers"]]

    @property
    def config(self) -> dict[str, Any]:
        return dict(yaml.safe_load((self.logs / "route.yaml").read_text()))

    @property
    def proxy(self) -> str:
        return f"http://127.0.0.1:{self.config['port']}"

    def end(self, *signals: signal.Signals) -> int:
        """Its exit code, behind those signals; all that it started is gone then."""
        for one in signals:
            self.process.child.send_signal(one)
        code = self.process.child.wait(PATIENCE)
        self.process.close()
        return code

    @property
    def said(self) -> str:
        return "\n".join(self.process.said)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(units: str, *arguments: str, route: object = None) -> Run:
        runs.append(Run(tmp_path, units, *arguments, route=route))
        return runs[-1]

    yield start
    for one in runs:
        one.process.close()


def answers(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.05)


def makers_of(url: str) -> set[str]:
    """Who answers four requests at once."""
    body = json.dumps(chat_request(8)).encode()

    def maker(_: int) -> str:
        with urlopen(Request(url + CHAT, body), timeout=PATIENCE) as answer:
            text = str(json.load(answer)["choices"][0]["message"]["content"])
        return text.partition(":")[0]

    with ThreadPoolExecutor(4) as clients:
        return set(clients.map(maker, range(4)))


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_ray_launcher_serves_by_all_nodes_until_signal(
    stop_signal: signal.Signals, launch: Callable[..., Run]
) -> None:
    run = launch("1,1,0", "--", *SERVED)
    run.process.line("ready at")
    assert run.config["health_interval"] == 0.1
    names = {url.rpartition(":")[2] for url in run.workers}
    until(lambda: makers_of(run.proxy) == {f"w{name}" for name in names})
    everything = [*run.workers, run.proxy]
    assert all(map(answers, everything))
    assert run.end(stop_signal) == 0
    assert "closed, 0 left" in run.said
    assert not any(map(answers, everything))
    assert "Traceback" not in run.said


def test_ray_launcher_per_node_gives_server_all_units(launch: Callable[..., Run]) -> None:
    port = free_port()
    run = launch("4", "--per", "node", "--first-port", str(port), "--", *SERVED)
    run.process.line("ready at")
    assert "placed on n0, 4 unit(s)" in run.said
    assert run.workers == [f"http://127.0.0.1:{port}"]
    assert run.end(signal.SIGINT) == 0


def test_ray_launcher_names_server_that_never_becomes_healthy(launch: Callable[..., Run]) -> None:
    run = launch("1", "--start-timeout", "0.5", "--", *UNWELL)
    assert run.end() == 3
    assert "server 0 on 127.0.0.1 is not healthy behind 0.5 s" in run.said
    assert "closed, 0 left" in run.said
    assert not (run.logs / "route.yaml").exists()


def test_ray_launcher_quotes_log_of_server_that_dies_at_start(
    launch: Callable[..., Run],
) -> None:
    run = launch("2", "--", *DEAD)
    assert run.end() == 3
    # Both die at once, and either may be seen first.
    assert " on 127.0.0.1 died: it ended with exit code 1; its log ends:" in run.said
    assert "no weights for 127.0.0.1:" in run.said
    assert "closed, 0 left" in run.said


def test_ray_launcher_ends_all_when_running_server_dies(launch: Callable[..., Run]) -> None:
    run = launch("2", "--", *FRAIL)
    assert run.end() == 3
    assert "died: it ended with exit code 9; its log ends:" in run.said
    assert "out of memory" in run.said
    assert "closed, 0 left" in run.said
    assert not any(map(answers, [*run.workers, run.proxy]))


def test_ray_launcher_signal_ends_starting_servers(launch: Callable[..., Run]) -> None:
    run = launch("2", "--", *UNWELL)
    urls = [run.process.line(": http").split()[5].rstrip(",") for _ in range(2)]
    run.process.line("waiting for 2")
    until(lambda: all(map(answers, urls)))
    assert run.end(signal.SIGINT) == 130
    assert not any(map(answers, urls))


def test_ray_launcher_kill_ends_servers_and_proxy(launch: Callable[..., Run]) -> None:
    run = launch("2", "--", *SERVED)
    run.process.line("ready at")
    everything = [*run.workers, run.proxy]
    run.process.child.kill()
    until(lambda: not any(map(answers, everything)))


def test_ray_launcher_finishes_open_stream_after_signal(launch: Callable[..., Run]) -> None:
    run = launch("1", "--", *SERVED)
    run.process.line("ready at")
    body = json.dumps(chat_request(40, stream=True)).encode()
    with urlopen(Request(run.proxy + CHAT, body), timeout=PATIENCE) as answer:
        answer.readline()
        run.process.child.send_signal(signal.SIGINT)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert run.end() == 0


def test_ray_launcher_reports_used_port(launch: Callable[..., Run]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = launch("1", "--first-port", str(port), "--", *SERVED)
        assert run.end() == 3
        assert f"server 0 on 127.0.0.1: port {port} cannot be had: Address already" in run.said
        run = launch("1", "--", *SERVED, route={"port": port})
        assert run.end() == 3
        assert f"the proxy: port {port} cannot be had" in run.said
    assert run.said.count("closed, 0 left") == 1


def test_ray_launcher_ends_all_when_proxy_rejects_config(launch: Callable[..., Run]) -> None:
    run = launch("1", "--", *SERVED, route={"port": 0, "polcy": "fit"})
    assert run.end() == 3
    assert "polcy" in run.said
    assert "the proxy died: it ended with exit code 2" in run.said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--", "serve"), "the command has no {port} in it"),
        (("--first-port", "70000", "--", "s", "{port}"), "--first-port has to be 0 to 65535"),
        (("--start-timeout", "nan", "--", "s", "{port}"), "--start-timeout has to be above 0"),
        (("--route", "nowhere.yaml", "--", "s", "{port}"), "--route: nowhere.yaml"),
        (("--", "s", "{port}"), "none has what a server needs: --resource"),
    ],
)
@pytest.mark.usefixtures("own_handlers")
def test_ray_launcher_rejects_bad_input(
    arguments: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main("0", ["--logs", str(tmp_path), *arguments])
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2
    assert why in line


def test_ray_launcher_rejects_workers_in_route_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    route = tmp_path / "route.yaml"
    route.write_text("workers: []")
    code = main("1", ["--logs", str(tmp_path), "--route", str(route), "--", *SERVED])
    assert code == 2
    assert "has workers, which are written here" in capsys.readouterr().err


def test_ray_launcher_reports_missing_command(launch: Callable[..., Run]) -> None:
    run = launch("1", "--", "no-such-program", "{port}")
    assert run.end() == 3
    assert "server 0 on 127.0.0.1 died: it cannot be started:" in run.said


def test_ray_launcher_without_ray_exits_2_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('not here')")  # in front of any other
    before = [path] if (path := os.environ.get("PYTHONPATH")) else []
    completed = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_workers.py"), "--", "serve", "{port}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *before])},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert completed.returncode == 2
    assert completed.stderr == "ray_workers: this takes Ray, pip install ray: not here\n"


def test_ray_launcher_reports_uncreatable_log_folder(
    tmp_path: Path, launch: Callable[..., Run]
) -> None:
    (tmp_path / "logs").write_text("a file")
    run = launch("1", "--", *SERVED)
    assert run.end() == 3
    assert "ray_workers: server 0 on 127.0.0.1: [Errno" in run.said
    assert "closed, 0 left" in run.said


def test_local_cluster_has_signatures_of_ray_cluster() -> None:
    cluster = part("ray_launch.cluster")
    local = __import__("helpers.fakes.fake_ray_cluster", fromlist=["LocalCluster"]).LocalCluster
    for name in ("nodes", "place", "call", "release", "close"):
        expected, own, ray = (
            getattr(kind, name).__code__.co_varnames[: getattr(kind, name).__code__.co_argcount]
            for kind in (cluster.Cluster, local, cluster.RayCluster)
        )
        assert expected == own == ray


@pytest.fixture
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
def test_stop_event_keeps_signal_sent_before_wait() -> None:
    stop_event = threading.Event()
    part("ray_workers").hear(stop_event)
    with stop_event._cond:  # type: ignore[attr-defined]  # as within `stop_event.wait()`
        signal.raise_signal(signal.SIGTERM)
    assert stop_event.wait(PATIENCE)


def test_ray_server_holds_port_while_its_process_starts() -> None:
    server = part("ray_launch.server").Server()
    port = server.hold(0)
    server.start([sys.executable, "-c", "import time; time.sleep(60)"], "", 1.0)
    try:
        with pytest.raises(OSError, match="Address already in use"), socket.socket() as other:
            other.bind(("", port))
    finally:
        server.tell()
        assert server.status(PATIENCE) is not None


def test_ray_server_reserves_port_until_release() -> None:
    server = part("ray_launch.server").Server
    first, second = server(), server()
    port = first.hold(0)
    try:
        assert second.hold(0) != port
        with pytest.raises(OSError, match="Address already in use"), socket.socket() as other:
            other.bind(("", port))
    finally:
        first.tell()
        second.tell()
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}", timeout=1.0)
