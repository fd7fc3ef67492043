"""In place of Ray: nodes that are all this machine, for `examples/ray_workers.py`.

As a program: `python -m helpers.fakes.fake_ray_cluster UNITS,UNITS ARGUMENTS`, with the units of
each node.
"""

import sys
from importlib import import_module
from typing import Any

from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
ADDRESSES = ("127.0.0.1", "localhost")


def part(name: str) -> Any:
    """A module among the examples."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return import_module(name)


class LocalCluster:
    """Keeps `Cluster`: its servers live in this process, their processes on this machine."""

    def __init__(self, units: tuple[int, ...]) -> None:
        self._units = units
        self._placements = 0

    def nodes(self) -> list[Any]:
        node = part("ray_launch.cluster").Node
        return [
            node(id=f"n{number}", address=ADDRESSES[number % 2], units=units)
            for number, units in enumerate(self._units)
        ]

    def place(self, node: Any, units: int) -> object:
        print(f"placed on {node.id}, {units} unit(s)", flush=True)
        self._placements += 1
        return part("ray_launch.server").Server()

    def call(self, server: object, method: str, *arguments: object) -> Any:
        try:
            return getattr(server, method)(*arguments)
        except OSError as error:
            raise part("ray_launch.errors").LaunchError(str(error)) from error

    def release(self, server: object) -> None:
        assert server is not None
        self._placements -= 1

    def close(self) -> None:
        print(f"closed, {self._placements} left", flush=True)


def main(units: str, arguments: list[str]) -> int:
    cluster = LocalCluster(tuple(int(one) for one in units.split(",")))
    code = part("ray_workers").main(arguments, lambda address, resource: cluster)
    assert isinstance(code, int)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
