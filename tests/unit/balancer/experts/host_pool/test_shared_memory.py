"""Anonymous memory: its size is fixed, nothing is left of it, and a seal is for ever."""

import errno
import faulthandler
import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.harnesses.host_pool import holdings
from helpers.processes.shared_memory import left_since, segments

from equipoise.balancer.experts.host_pool import shared_memory
from equipoise.balancer.experts.host_pool.shared_memory import HugePages, SharedMapping
from equipoise.hal.errors import ExpertPoolError, PoolIncomplete, PoolLeased

NBYTES = 4 * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def descriptor() -> Iterator[int]:
    memory_fd = shared_memory.create(NBYTES)
    yield memory_fd
    os.close(memory_fd)


def test_memory_has_no_name_and_is_freed_with_last_holder() -> None:
    named_segments, before = segments(), holdings()
    descriptor = shared_memory.create(NBYTES)
    mapping = SharedMapping.for_writing(descriptor, NBYTES)
    assert left_since(named_segments) == set()
    memory_stat = os.fstat(descriptor)
    assert not [p for p in segments() if p.exists() and os.path.samestat(p.stat(), memory_stat)]
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    mapping.close()
    assert holdings() == before


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1])
def test_memory_size_cannot_be_changed(descriptor: int, nbytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, nbytes)
    assert os.fstat(descriptor).st_size == NBYTES


def test_memory_written_by_one_mapping_is_read_by_another(descriptor: int) -> None:
    writer = SharedMapping.for_writing(descriptor, NBYTES)
    reader = SharedMapping.for_reading(descriptor, NBYTES)
    writer.tensor()[5:8] = 7
    assert reader.tensor().nonzero().flatten().tolist() == [5, 6, 7]


def test_memory_seal_requires_no_writer_and_forbids_new_ones(descriptor: int) -> None:
    writer = SharedMapping.for_writing(descriptor, NBYTES)
    writer.tensor()[3] = 9
    with pytest.raises(ExpertPoolError, match="cannot be sealed"):
        shared_memory.seal(descriptor)
    writer.close()
    shared_memory.seal(descriptor)
    assert shared_memory.seals(descriptor) & shared_memory.WRITE_SEAL
    with pytest.raises(ExpertPoolError, match="cannot map"):
        SharedMapping.for_writing(descriptor, NBYTES)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    assert int(SharedMapping.for_reading(descriptor, NBYTES).tensor()[3]) == 9


def test_memory_write_through_read_mapping_kills_process(descriptor: int) -> None:
    reader = SharedMapping.for_reading(descriptor, NBYTES)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        reader.tensor()[0] = 1
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status < 0
    assert int(reader.tensor().sum()) == 0


def test_memory_stays_mapped_while_a_tensor_uses_it(descriptor: int) -> None:
    mapping = SharedMapping.for_reading(descriptor, NBYTES)
    part = mapping.tensor()[8:16].view(torch.int64)
    with pytest.raises(PoolLeased, match="still in use"):
        mapping.close()
    mapping.close_with_last_tensor()
    before = holdings()[1]
    del mapping
    gc.collect()
    assert holdings()[1] == before
    assert int(part[0]) == 0
    del part
    gc.collect()
    assert holdings()[1] == before - 1


def test_memory_seals_while_forked_child_is_alive(descriptor: int) -> None:
    writer = SharedMapping.for_writing(descriptor, NBYTES)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    writer.close()
    shared_memory.seal(descriptor)
    os.close(write_end)
    os.close(read_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_reserve_reports_full_machine(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_no_space(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shared_memory.reserve(descriptor, 0, NBYTES)
    assert os.fstat(descriptor).st_blocks * 512 == NBYTES
    monkeypatch.setattr(os, "posix_fallocate", raise_no_space)
    with pytest.raises(PoolIncomplete, match=f"cannot reserve {NBYTES} bytes: No space left"):
        shared_memory.reserve(descriptor, 0, NBYTES)


def test_memory_populate_allocates_touched_pages(descriptor: int) -> None:
    mapping = SharedMapping.for_writing(descriptor, NBYTES)
    mapping.populate(NBYTES // 2, NBYTES // 2)
    assert os.fstat(descriptor).st_blocks * 512 in (0, NBYTES // 2)  # 0: an older kernel
    mapping.populate(1, NBYTES)  # what cannot be done is left out
    mapping.close()


def test_memory_create_refuses_unaddressable_size() -> None:
    before = holdings()
    with pytest.raises(ExpertPoolError, match="no shared memory of"):
        shared_memory.create(1 << 63)
    with pytest.raises(ExpertPoolError, match="no shared memory of"):
        shared_memory.create(-1)
    assert holdings() == before


def test_memory_create_works_without_noexec_seal_support(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & shared_memory.MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "unknown flag")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    descriptor = shared_memory.create(NBYTES)
    assert shared_memory.seals(descriptor) & shared_memory.SIZE_SEALS == shared_memory.SIZE_SEALS
    os.close(descriptor)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("always within_size [advise] never deny force", HugePages.ADVISED),
        ("[always] within_size advise never deny force", HugePages.ADVISED),
        ("always within_size advise [never] deny force", HugePages.REFUSED),
        ("always within_size advise never [deny] force", HugePages.REFUSED),
        (None, HugePages.REFUSED),
    ],
)
def test_memory_reports_outcome_of_huge_page_request(
    descriptor: int,
    setting: str | None,
    expected: HugePages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "shmem_enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(shared_memory, "HUGE_PAGES_SETTING", path)
    assert SharedMapping.for_writing(descriptor, NBYTES).huge_pages is expected
