r"""Servers on all nodes of a Ray cluster, and `equipoise route` in front of them.

    python examples/ray_workers.py --route route.yaml -- \
        vllm serve MODEL --host 0.0.0.0 --port {port}

On the head node. One server a GPU, or one a node (`--per node`), is started by the command behind
`--`, in which {port} and {node}, the node's address, are filled in. A free port is held until its
server ends, who has to bind it with SO_REUSEADDR, as most do; `--first-port` is for others. When
every server has answered GET /health with 200, they are written into the proxy's configuration as
its workers, beside the keys of `--route`, and the proxy is started here. It stands until SIGINT or
SIGTERM, or until a server or the proxy dies; then all that was started is ended, the proxy first.
Where this program itself is killed, guards beside the servers notice.

Exit code: the proxy's behind a signal, 130 for a signal before there was one, 2 for bad input, 3
where something failed.

What was run: all but `RayCluster` of `ray_launch/cluster.py`, by tests, with a stand-in for it that
has real processes on one machine. Nothing here was run with Ray: that class is written by what
Ray's documentation says, and no test calls it, but where Ray is missing.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread

import yaml
from ray_launch.cluster import Cluster, RayCluster
from ray_launch.errors import BadInput, LaunchError
from ray_launch.launch import Launch, Per, Plan

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LONGEST = 7 * 86_400.0


def parser() -> argparse.ArgumentParser:
    """The options; each has a default."""
    options_parser = argparse.ArgumentParser(
        prog="ray_workers.py", description="Servers on a Ray cluster, and a proxy in front of them."
    )
    add = options_parser.add_argument
    add("command", nargs="+", help="of a server, behind --; {port} and {node} are filled in")
    add("--address", default="auto", help="of the cluster, as ray.init takes it (auto)")
    add("--resource", default="GPU", help="that servers need, by Ray's name for it (GPU)")
    add(
        "--per",
        type=Per,
        default=Per.UNIT,
        metavar="unit|node",
        help="one server for each unit of that, or for all of a node (unit)",
    )
    add(
        "--first-port",
        type=int,
        default=0,
        metavar="N",
        help="of each node's servers, which follow each other (0: free ones)",
    )
    add(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="for all servers to become healthy (900)",
    )
    add("--route", type=Path, metavar="FILE", help="the proxy's configuration, without workers")
    add(
        "--logs",
        type=Path,
        default=Path("ray-workers"),
        metavar="DIR",
        help="for logs on each node, and the configuration that was written (ray-workers)",
    )
    return options_parser  # fmt: skip


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What is asked for. Raises BadInput."""
    if not any("{port}" in word for word in arguments.command):
        raise BadInput("the command has no {port} in it: servers would not know theirs")
    if not 0 <= arguments.first_port < 1 << 16:
        raise BadInput(f"--first-port has to be 0 to 65535, got {arguments.first_port}")
    if not 0 < arguments.start_timeout <= LONGEST:
        raise BadInput(f"--start-timeout has to be above 0, got {arguments.start_timeout:g}")
    return Plan(
        command=tuple(arguments.command),
        route=route_of(arguments.route),
        per=arguments.per,
        first_port=arguments.first_port,
        start_timeout=arguments.start_timeout,
        logs=arguments.logs.absolute(),
    )


def route_of(path: Path | None) -> dict[str, object]:
    """Keys of the proxy's configuration. Raises BadInput; their values are the proxy's matter."""
    if path is None:
        return {}
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"--route: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise BadInput(f"--route: {path} has to have keys and values")
    if "workers" in settings:
        raise BadInput(f"--route: {path} has workers, which are written here")
    return settings


def main(arguments: Sequence[str], connect: Callable[[str, str], Cluster] = RayCluster) -> int:
    """Returns the exit code; `connect` is told the cluster's address and the resource."""
    options = parser().parse_args(arguments)
    stop = Event()
    try:
        plan = plan_of(options)
        hear(stop)
        cluster = connect(options.address, options.resource)
        hear(stop)  # again, since Ray has put a handler of its own there
        return Launch(plan, cluster, stop, say).run()
    except LaunchError as error:
        say(str(error))
        return error.code


def hear(stop: Event) -> None:
    """Have signals set it, and do nothing else.

    On a thread: the handler interrupts whoever waits for the event, and may hold its lock.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: Thread(target=stop.set).start())


def say(line: str) -> None:
    """To standard error, at once."""
    print(f"ray_workers: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
