"""How much memory can be had, by what the system says in its own files."""

from pathlib import Path

import pytest

from equipoise.balancer.experts.host_pool.shared_memory import MemoryLimit, available_memory

GIB = 1 << 30


class System:
    """A made-up `/proc` and control group folder."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "groups"
        self.write(self.proc / "meminfo", "MemTotal: 99 kB\nMemAvailable: 33554432 kB\n")
        self.write(self.proc / "self" / "cgroup", "0::/\n")
        self.groups.mkdir()

    def write(self, path: Path, text: str | int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}")

    def write_v2_group(self, path: str, limit: str | int, usage: int, file_cache: int = 0) -> None:
        """A group of version 2."""
        directory = self.groups / path
        self.write(directory / "memory.max", limit)
        self.write(directory / "memory.current", usage)
        self.write(directory / "memory.stat", f"anon 7\ninactive_file {file_cache}\n")

    def write_v1_group(self, path: str, limit: int, usage: int, file_cache: int = 0) -> None:
        """A group of version 1."""
        directory = self.groups / "memory" / path
        self.write(directory / "memory.limit_in_bytes", limit)
        self.write(directory / "memory.usage_in_bytes", usage)
        self.write(directory / "memory.stat", f"cache 7\ntotal_inactive_file {file_cache}\n")

    def available(self) -> MemoryLimit:
        return available_memory(self.proc, self.groups)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_available_memory_without_cgroup_limit_is_that_of_machine(system: System) -> None:
    assert system.available() == MemoryLimit(32 * GIB, "this machine's memory")


def test_available_memory_respects_tightest_cgroup_of_path(system: System) -> None:
    system.write(system.proc / "self" / "cgroup", "0::/jobs/mine\n")
    system.write_v2_group("jobs/mine", "max", 5)
    system.write_v2_group("jobs", 10 * GIB, 7 * GIB, file_cache=GIB)
    assert system.available() == MemoryLimit(4 * GIB, f"control group {system.groups / 'jobs'}")
    system.write_v2_group("jobs/mine", 2 * GIB, GIB)
    assert system.available() == MemoryLimit(GIB, f"control group {system.groups / 'jobs/mine'}")


def test_available_memory_respects_cgroup_v1(system: System) -> None:
    text = "7:cpu:/other\n4:memory,hugetlb:/jobs/mine\n0::/\n"
    system.write(system.proc / "self" / "cgroup", text)
    system.write_v1_group("jobs", 3 * GIB, 2 * GIB, file_cache=GIB // 2)
    limit = system.available()
    assert limit == MemoryLimit(3 * GIB // 2, f"control group {system.groups / 'memory/jobs'}")


def test_available_memory_is_zero_when_cgroup_exceeds_limit(system: System) -> None:
    system.write_v2_group("", GIB, 2 * GIB)
    assert system.available().free == 0


def test_available_memory_respects_cgroup_root_in_container(system: System) -> None:
    system.write(system.proc / "self" / "cgroup", "0::/not/seen/here\n")
    system.write_v2_group("", 2 * GIB, GIB)
    assert system.available() == MemoryLimit(GIB, f"control group {system.groups}")


def test_available_memory_raises_without_memavailable(system: System) -> None:
    system.write(system.proc / "meminfo", "MemTotal: 99 kB\n")
    with pytest.raises(ValueError, match="does not say"):
        system.available()
