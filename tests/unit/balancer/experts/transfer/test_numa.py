"""Which processors are near, and how many threads they carry."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.transfer import copy_threads
from equipoise.hal.errors import HostCopyError
from equipoise.hal.support.numa import UNKNOWN_NODE, parse_cpus


def cpu_list(cpus: set[int]) -> str:
    """A CPU list in the format of the kernel."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) + "\n"


def machine(root: Path, **lists: str) -> Path:
    for node, text in lists.items():
        (root / node).mkdir()
        (root / node / "cpulist").write_text(text)
    return root


@given(st.sets(st.integers(0, 300)))
def test_parse_cpus_reads_kernel_cpu_list(cpus: set[int]) -> None:
    assert parse_cpus(cpu_list(cpus)) == cpus


def test_near_cpus_are_allowed_cpus_of_the_node(tmp_path: Path) -> None:
    root = machine(tmp_path, node0="0-3,8\n", node1="4-7\n", node2="\n")
    assert copy_threads.cpus_of(0, root) == {0, 1, 2, 3, 8}
    assert copy_threads.near_cpus(0, frozenset({2, 3, 4}), root) == {2, 3}
    assert copy_threads.near_cpus(1, frozenset({0}), root) == frozenset()
    assert copy_threads.near_cpus(2, frozenset({0}), root) == frozenset()
    assert copy_threads.near_cpus(UNKNOWN_NODE, frozenset({0}), root) == frozenset()


@pytest.mark.parametrize("text", ["x", "3-", "1-2-3"])
def test_cpus_of_names_unreadable_node(text: str, tmp_path: Path) -> None:
    root = machine(tmp_path, node1=text)
    with pytest.raises(HostCopyError, match="NUMA node 1"):
        copy_threads.cpus_of(1, root)
    with pytest.raises(HostCopyError, match="NUMA node 7"):
        copy_threads.cpus_of(7, root)


# Processors of the node and accelerators on it, and the threads by the published rule, which never
# are more than processors.
COUNTS = [
    (72, 1, 16),
    (64, 2, 16),
    (56, 4, 7),
    (32, 4, 4),
    (8, 1, 4),
    (6, 8, 4),
    (3, 1, 3),
    (1, 1, 1),
]


@pytest.mark.parametrize(("cpus", "accelerators", "threads"), COUNTS)
def test_thread_count_follows_published_rule(cpus: int, accelerators: int, threads: int) -> None:
    assert copy_threads.thread_count(cpus, accelerators) == threads


@pytest.mark.parametrize(("cpus", "accelerators"), [(0, 1), (4, 0)])
def test_thread_count_refuses_no_cpus_or_no_accelerators(cpus: int, accelerators: int) -> None:
    with pytest.raises(HostCopyError, match="no threads"):
        copy_threads.thread_count(cpus, accelerators)
