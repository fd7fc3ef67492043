"""All that is wanted of Ray, and Ray's own answer to it."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ray_launch.errors import BadInput, LaunchError, line_of
from ray_launch.server import Server

CALL = 60.0
"""Seconds for a call of a node, its time for a placement included."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster.

    Attributes:
        id: the cluster's name for it.
        address: where its servers answer.
        units: what it has of the resource that servers need.
    """

    id: str
    address: str
    units: int


class Cluster(Protocol):
    """Machines on which a `Server` can be. Every call is bounded, and raises LaunchError."""

    def nodes(self) -> list[Node]:
        """Those that are alive."""
        ...

    def place(self, node: Node, units: int) -> object:
        """A `Server` on that node, with so many of its units to itself."""
        ...

    def call(self, server: object, method: str, *arguments: object) -> Any:
        """What that method of a server that was placed returns."""
        ...

    def release(self, server: object) -> None:
        """It is wanted no more."""
        ...

    def close(self) -> None:
        """Nothing of the cluster is wanted any more."""
        ...


class RayCluster:
    """Ray's own.

    Args:
        address: of the cluster, as `ray.init` takes it.
        resource: what servers need units of: `GPU`, or another one that Ray counts, as `NPU`.

    Raises: BadInput without Ray; LaunchError without a cluster.
    """

    def __init__(self, address: str, resource: str) -> None:
        try:
            self._ray: Any = import_module("ray")
            strategies: Any = import_module("ray.util.scheduling_strategies")
        except ImportError as error:
            raise BadInput(f"this takes Ray, pip install ray: {line_of(error)}") from error
        self._on = strategies.NodeAffinitySchedulingStrategy
        self._resource = resource
        needed = {"py_modules": [str(Path(__file__).parent)]}  # this folder, for the other nodes
        try:
            self._ray.init(address=address, runtime_env=needed, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(f"no cluster of Ray at {address}: {line_of(error)}") from error

    def nodes(self) -> list[Node]:
        """See `Cluster`."""
        return [
            Node(
                id=one["NodeID"],
                address=one["NodeManagerAddress"],
                units=int(one["Resources"].get(self._resource, 0)),
            )
            for one in self._ray.nodes()
            if one["Alive"]
        ]

    def place(self, node: Node, units: int) -> object:
        """See `Cluster`; Ray shows the server those units only, by the environment."""
        own: dict[str, object] = {"resources": {self._resource: units}}
        if self._resource == "GPU":
            own = {"num_gpus": units}
        there = self._on(node_id=node.id, soft=False)
        actor = self._ray.remote(Server).options(num_cpus=0, scheduling_strategy=there, **own)
        return actor.remote()

    def call(self, server: object, method: str, *arguments: object) -> Any:
        """See `Cluster`."""
        try:
            return self._ray.get(getattr(server, method).remote(*arguments), timeout=CALL)
        except self._ray.exceptions.GetTimeoutError as error:
            raise LaunchError(f"no answer within {CALL:g} s") from error
        except self._ray.exceptions.RayError as error:
            raise LaunchError(line_of(getattr(error, "cause", None) or error)) from error

    def release(self, server: object) -> None:
        """See `Cluster`."""
        self._ray.kill(server)

    def close(self) -> None:
        """See `Cluster`."""
        self._ray.shutdown()
