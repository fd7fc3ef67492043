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
from helpers.harnesses.pooling import holdings
from helpers.processes.shared_memory import left_since, segments

from equipoise.balancer.experts.host import memory
from equipoise.balancer.experts.host.memory import HugePages, Mapping
from equipoise.hal.errors import ExpertPoolError, PoolIncomplete, PoolLeased

NBYTES = 4 * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = memory.create(NBYTES)
    yield made
    os.close(made)


def test_it_has_no_name_anywhere_and_ends_with_its_last_holder() -> None:
    named, before = segments(), holdings()
    descriptor = memory.create(NBYTES)
    mapping = Mapping.to_write(descriptor, NBYTES)
    assert left_since(named) == set()
    made = os.fstat(descriptor)
    assert not [p for p in segments() if p.exists() and os.path.samestat(p.stat(), made)]
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{descriptor}")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    mapping.close()
    assert holdings() == before


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1])
def test_nobody_changes_its_size(descriptor: int, nbytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, nbytes)
    assert os.fstat(descriptor).st_size == NBYTES


def test_what_one_mapping_writes_the_other_reads(descriptor: int) -> None:
    writer = Mapping.to_write(descriptor, NBYTES)
    reader = Mapping.to_read(descriptor, NBYTES)
    writer.tensor()[5:8] = 7
    assert reader.tensor().nonzero().flatten().tolist() == [5, 6, 7]


def test_no_seal_while_somebody_could_write_and_no_writer_afterwards(descriptor: int) -> None:
    writer = Mapping.to_write(descriptor, NBYTES)
    writer.tensor()[3] = 9
    with pytest.raises(ExpertPoolError, match="cannot be sealed"):
        memory.seal(descriptor)
    writer.close()
    memory.seal(descriptor)
    assert memory.seals(descriptor) & memory.READ_ONLY
    with pytest.raises(ExpertPoolError, match="cannot map"):
        Mapping.to_write(descriptor, NBYTES)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    assert int(Mapping.to_read(descriptor, NBYTES).tensor()[3]) == 9


def test_to_write_to_what_is_only_to_be_read_kills_the_process(descriptor: int) -> None:
    reader = Mapping.to_read(descriptor, NBYTES)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        reader.tensor()[0] = 1
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status < 0
    assert int(reader.tensor().sum()) == 0


def test_a_tensor_keeps_the_memory_mapped_whatever_is_closed(descriptor: int) -> None:
    mapping = Mapping.to_read(descriptor, NBYTES)
    part = mapping.tensor()[8:16].view(torch.int64)
    with pytest.raises(PoolLeased, match="still in use"):
        mapping.close()
    mapping.abandon()
    before = holdings()[1]
    del mapping
    gc.collect()
    assert holdings()[1] == before
    assert int(part[0]) == 0
    del part
    gc.collect()
    assert holdings()[1] == before - 1


def test_a_forked_child_does_not_keep_it_from_being_sealed(descriptor: int) -> None:
    writer = Mapping.to_write(descriptor, NBYTES)
    hold, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_go)
        os.read(hold, 1)
        os._exit(0)
    writer.close()
    memory.seal(descriptor)
    os.close(let_go)
    os.close(hold)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_full_machine_is_said_before_the_first_byte(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory.reserve(descriptor, 0, NBYTES)
    assert os.fstat(descriptor).st_blocks * 512 == NBYTES
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PoolIncomplete, match=f"cannot reserve {NBYTES} bytes: No space left"):
        memory.reserve(descriptor, 0, NBYTES)


def test_pages_that_were_touched_are_there(descriptor: int) -> None:
    mapping = Mapping.to_write(descriptor, NBYTES)
    mapping.populate(NBYTES // 2, NBYTES // 2)
    assert os.fstat(descriptor).st_blocks * 512 in (0, NBYTES // 2)  # 0: an older kernel
    mapping.populate(1, NBYTES)  # what cannot be done is left out
    mapping.close()


def test_more_than_the_system_can_address_is_an_error_and_leaves_nothing() -> None:
    before = holdings()
    with pytest.raises(ExpertPoolError, match="no shared memory of"):
        memory.create(1 << 63)
    with pytest.raises(ExpertPoolError, match="no shared memory of"):
        memory.create(-1)
    assert holdings() == before


def test_a_kernel_that_knows_no_seal_on_execution_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & memory.NO_EXECUTION:
            raise OSError(errno.EINVAL, "unknown flag")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    descriptor = memory.create(NBYTES)
    assert memory.seals(descriptor) & memory.SIZED == memory.SIZED
    os.close(descriptor)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("always within_size [advise] never deny force", HugePages.ADVISED),
        ("[always] within_size advise never deny force", HugePages.ADVISED),
        ("always within_size advise [never] deny force", HugePages.REFUSED),
        ("always within_size advise never [deny] force", HugePages.REFUSED),
        (None, HugePages.REFUSED),
    ],
)
def test_what_becomes_of_the_wish_for_huge_pages_is_told(
    descriptor: int,
    setting: str | None,
    told: HugePages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "shmem_enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(memory, "HUGE", path)
    assert Mapping.to_write(descriptor, NBYTES).huge_pages is told
