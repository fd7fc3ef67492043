"""Servers of a cluster and the proxy in front of them, from their start to their end."""

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from http.client import HTTPException
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any
from urllib.request import ProxyHandler, build_opener

import yaml

from ray_launch.cluster import Cluster, Node
from ray_launch.errors import BadInput, LaunchError
from ray_launch.server import Server

ANSWER, TURN, LISTENING = 2.0, 0.3, 60.0
"""Seconds: for an answer of a server, from one look at all to the next, for the proxy to listen."""
GRACE, DRAIN = 10.0, 30.0
"""Seconds until what was told to end is killed; the proxy drains before, so long by default."""
INTERRUPTED = 130
DIRECT = build_opener(ProxyHandler({}))
"""To servers within the cluster, whatever proxy the environment names for the world."""


class Interrupted(Exception):
    """A signal came before the proxy was there."""


@unique
class Per(Enum):
    """What each server has to itself."""

    UNIT = "unit"
    NODE = "node"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for.

    Attributes:
        command: of a server, with {port} in it and, where it likes, {node}, its address.
        route: keys of the proxy's configuration but `workers`.
        per: what each server has to itself.
        first_port: of the servers of a node; 0: free ones.
        start_timeout: seconds for all servers to become healthy.
        logs: absolute folder on each node for logs; here for the proxy's configuration too.
    """

    command: tuple[str, ...]
    route: Mapping[str, object]
    per: Per
    first_port: int
    start_timeout: float
    logs: Path


@dataclass(frozen=True)
class PlacedServer:
    """A server that the cluster has."""

    server: object
    name: str
    address: str
    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


class Launch:
    """One run.

    Args:
        plan: what is asked for.
        cluster: where; it is closed in the end.
        stop: set when all is to end.
        say: told one line at a time.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, stop: Event, say: Callable[[str], None]
    ) -> None:
        self._plan, self._cluster, self._stop, self._say = plan, cluster, stop, say
        self._servers: list[PlacedServer] = []
        self._proxy: Server | None = None

    def run(self) -> int:
        """Returns the exit code; raises LaunchError. Either way everything has been ended."""
        try:
            self._place()
            self._start()
            self._wait_until_healthy()
            self._route()
            self._watch()
        except Interrupted:
            self._say("interrupted")
        finally:
            code = self._end()
        return code

    def _place(self) -> None:
        """Every port is held before any is used."""
        nodes = self._cluster.nodes()
        for node in nodes:
            for number in range(node.units if self._plan.per is Per.UNIT else 1):
                self._place_one(node, number)
        if not self._servers:
            raise BadInput(f"{len(nodes)} node(s), and none has what a server needs: --resource")

    def _place_one(self, node: Node, number: int) -> None:
        units = 1 if self._plan.per is Per.UNIT else node.units
        requested_port = self._plan.first_port + number if self._plan.first_port else 0
        name = f"server {len(self._servers)} on {node.address}"
        server = self._cluster.place(node, units)
        # First into the list: what follows may fail, and it has to be released then too.
        self._servers.append(PlacedServer(server, name, node.address, requested_port))
        port = self._call(self._servers[-1], "hold", requested_port)
        self._servers[-1] = PlacedServer(server, name, node.address, port)

    def _start(self) -> None:
        for number, one in enumerate(self._servers):
            command = [
                word.replace("{port}", str(one.port)).replace("{node}", one.address)
                for word in self._plan.command
            ]
            log = self._plan.logs / f"server-{number}.log"
            self._call(one, "start", command, str(log), GRACE)
            self._say(f"{one.name}: {one.url}, log {log}")

    def _wait_until_healthy(self) -> None:
        """Raises LaunchError for one that dies, or that is not healthy in time."""
        end = monotonic() + self._plan.start_timeout
        waiting = list(self._servers)
        self._say(f"waiting for {len(waiting)} server(s), {self._plan.start_timeout:g} s at most")
        while waiting:
            for one in list(waiting):
                self._pause(0.0)
                self._check(one)
                if _healthy(one.url):
                    waiting.remove(one)
                    self._say(f"{one.name}: healthy, {len(waiting)} to go")
                elif monotonic() > end:
                    message = f"{one.name} is not healthy behind {self._plan.start_timeout:g} s"
                    raise LaunchError(self._with_tail(one, message))
            self._pause(TURN if waiting else 0.0)

    def _route(self) -> None:
        """Write the proxy's configuration, and start it here."""
        requested_port = self._plan.route.get("port", 9000)
        if (
            not isinstance(requested_port, int)
            or isinstance(requested_port, bool)
            or not 0 <= requested_port < 1 << 16
        ):
            raise BadInput(f"--route: port has to be 0 to 65535, got {requested_port!r}")
        proxy = Server()
        try:
            port = proxy.hold(requested_port)
        except OSError as error:
            raise LaunchError(f"the proxy: {error}") from error
        path = self._configured(port)
        command = [sys.executable, "-m", "equipoise", "route", "--config", str(path)]
        self._proxy = proxy
        proxy.start(command, "", self._proxy_grace())
        self._wait_until_listening(str(self._plan.route.get("host", "127.0.0.1")), port)

    def _configured(self, port: int) -> Path:
        """The proxy's configuration, written."""
        workers = [{"url": one.url} for one in self._servers]
        config = {**self._plan.route, "port": port, "workers": workers}
        path = self._plan.logs / "route.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"{path} cannot be written: {error.strerror}") from error
        return path

    def _proxy_grace(self) -> float:
        drain = self._plan.route.get("drain_timeout", DRAIN)
        return 2 * GRACE + (drain if isinstance(drain, int | float) else DRAIN)

    def _wait_until_listening(self, host: str, port: int) -> None:
        end = monotonic() + LISTENING
        here = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        while not _listens(here, port):
            self._pause(TURN)
            self._check_proxy()
            if monotonic() > end:
                raise LaunchError(f"the proxy does not listen behind {LISTENING:g} s")
        self._say(f"ready at {here}:{port}, with {len(self._servers)} server(s)")

    def _watch(self) -> None:
        """Until it is told to end. Raises LaunchError when something dies."""
        while not self._stop.wait(TURN):
            self._check_proxy()
            for one in self._servers:
                self._check(one)

    def _check(self, one: PlacedServer) -> None:
        status = self._call(one, "status")
        if status is not None:
            raise LaunchError(self._with_tail(one, f"{one.name} died: {status}"))

    def _check_proxy(self) -> None:
        status = None if self._proxy is None else self._proxy.status()
        if status is not None:
            raise LaunchError(f"the proxy died: {status}")

    def _with_tail(self, one: PlacedServer, what: str) -> str:
        tail = self._call(one, "tail")
        return f"{what}; its log ends:\n{tail}" if tail else f"{what}; its log is empty"

    def _call(self, one: PlacedServer, method: str, *arguments: object) -> Any:
        """What a server answers; raises LaunchError that names it."""
        try:
            return self._cluster.call(one.server, method, *arguments)
        except LaunchError as error:
            raise LaunchError(f"{one.name}: {error}") from error

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Interrupted

    def _end(self) -> int:
        """End everything, the proxy first; what cannot be ended is told. Returns the exit code."""
        code = INTERRUPTED
        if self._proxy is not None:
            self._say("ending: the proxy, then its servers")
            self._proxy.tell()
            status = self._proxy.status(self._proxy_grace() + GRACE)
            code = LaunchError.code if self._proxy.code is None else self._proxy.code
            if status is None:
                self._say("the proxy may not have ended")
        for one in self._servers:
            self._try(one, "tell")
        for one in self._servers:
            if self._try(one, "status", GRACE + TURN * 10) is None:
                self._say(f"{one.name} may not have ended")
            try:
                self._cluster.release(one.server)
            except LaunchError as error:
                self._say(f"{one.name}: {error}")
        self._cluster.close()
        return code

    def _try(self, one: PlacedServer, method: str, *arguments: object) -> object:
        try:
            return self._call(one, method, *arguments)
        except LaunchError as error:
            self._say(str(error))
            return None


def _healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=ANSWER) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # nobody there yet, 503, or not in time
        return False


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), ANSWER).close()
    except OSError:
        return False
    return True
