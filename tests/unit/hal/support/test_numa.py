"""The NUMA node of the host processor."""

import os
from pathlib import Path

import pytest

from equipoise.balancer.experts.transfer.copy_threads import available_cpus, near_cpus
from equipoise.hal import registry
from equipoise.hal.support.numa import UNKNOWN_NODE, numa_node


def tree(root: Path, **lists: str) -> Path:
    """A system with these nodes."""
    for name, cpus in lists.items():
        (root / name).mkdir()
        (root / name / "cpulist").write_text(cpus + "\n", encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("allowed", "node"),
    [
        ({0}, 0),
        ({4, 5}, 1),
        ({0, 3, 8}, 0),
        ({11}, 12),
        ({3, 4}, UNKNOWN_NODE),
        ({0, 99}, UNKNOWN_NODE),
    ],
)
def test_numa_node_contains_all_allowed_processors(
    allowed: set[int], node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    root = tree(tmp_path, node0="0-3,8", node1="4-7", node2="", node12="10-11")
    assert numa_node(root) == node


def test_numa_node_unknown_without_readable_nodes(tmp_path: Path) -> None:
    assert numa_node(tmp_path / "none") == UNKNOWN_NODE
    (tmp_path / "node0").mkdir()
    assert numa_node(tmp_path) == UNKNOWN_NODE
    assert numa_node(tree(tmp_path, node1="a-b")) == UNKNOWN_NODE


def test_near_cpus_of_cpu_backend_are_all_available() -> None:
    accelerator = registry.accelerator("cpu").open(0)
    node = accelerator.topology().numa
    accelerator.close()
    assert node == numa_node()
    assert near_cpus(node, available_cpus()) == (available_cpus() if node >= 0 else frozenset())
