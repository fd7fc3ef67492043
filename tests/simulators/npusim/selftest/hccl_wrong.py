"""Communication that is wrong, or that meets trouble: each must be told, and nothing may hang."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npusim.selftest.hccl_rank import Rank, npu, until

Work = Any
"""torch's Work; its functions are not typed alike everywhere."""
NOT_SUPPORTED = 5
UINT8, INT16, FP64 = 7, 1, 10
SUM, PROD = 0, 2 - 1


def _fails(me: Rank, work: Work, what: str) -> None:
    """The operation ends with its stream's error."""
    me.kept_works.append(work)

    def has_failed() -> bool:
        try:
            work.is_completed()
        except RuntimeError:
            return True
        return False

    until(has_failed, f"the failure of {what}")
    me.compared += 1


def _ends(me: Rank, work: Work) -> None:
    me.kept_works.append(work)
    until(work.is_completed, "the end of an operation")


def _stays(me: Rank, work: Work, what: str) -> None:
    """The operation is still not done after a while, and the process is well."""
    start = time.monotonic()
    while time.monotonic() - start < 1.0:
        me.check(not work.is_completed(), f"{what} ended")
        time.sleep(0.05)


def _expect_refusal(me: Rank, call: Callable[[], object], text: str) -> None:
    try:
        call()
    except RuntimeError as error:
        me.check(text in str(error), f"{text!r} is not in {error}")
        return
    raise AssertionError(f"rank {me.index}: was not refused: {text}")


def _tensor(me: Rank, size: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.zeros(size, dtype=dtype).to(me.device)
    me.kept_works.append(tensor)
    return tensor


def mismatches(me: Rank) -> None:
    """Collectives that are not the same everywhere, each in a group of its own."""
    for case in (_kind, _count, _dtype, _reduction, _root, _split):
        _fails(me, case(me, me.group()), case.__name__)
        me.meet(case.__name__)


def _kind(me: Rank, group: dist.ProcessGroup) -> Work:
    x, y = _tensor(me), _tensor(me, 16)
    dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(y, x, group=group)
    if me.index == 0:
        return dist.all_reduce(x, group=group, async_op=True)
    return dist.all_gather_into_tensor(y, x, group=group, async_op=True)


def _count(me: Rank, group: dist.ProcessGroup) -> Work:
    return dist.all_reduce(_tensor(me, 8 - 4 * me.index), group=group, async_op=True)


def _dtype(me: Rank, group: dist.ProcessGroup) -> Work:
    tensor = _tensor(me, 8, (torch.float32, torch.int32)[me.index])
    return dist.all_reduce(tensor, group=group, async_op=True)


def _reduction(me: Rank, group: dist.ProcessGroup) -> Work:
    op = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[me.index]
    return dist.all_reduce(_tensor(me), op, group=group, async_op=True)


def _root(me: Rank, group: dist.ProcessGroup) -> Work:
    return dist.broadcast(_tensor(me), me.index, group=group, async_op=True)


def _split(me: Rank, group: dist.ProcessGroup) -> Work:
    splits = ([4, 4], [2, 4])[me.index]
    x, y = _tensor(me, sum(splits)), _tensor(me)
    return dist.all_to_all_single(y, x, [4, 4], splits, group=group, async_op=True)


def first_uses(me: Rank) -> None:
    """Different collectives at the first use of a group: told when their links are built."""
    group = me.group()
    x, y = _tensor(me), _tensor(me, 16)
    if me.index == 0:
        _expect_refusal(me, lambda: dist.all_reduce(x, group=group), "first use does not match")
    else:
        call = lambda: dist.all_gather_into_tensor(y, x, group=group)  # noqa: E731
        _expect_refusal(me, call, "first use does not match")
    me.meet("first uses")


def unequal(me: Rank) -> None:
    """A send and a receive of different sizes."""
    x = _tensor(me)
    group = me.group()
    work = dist.isend(x, 1, group) if me.index == 0 else dist.irecv(x[:4], 0, group)
    _fails(me, work, "a message")
    me.meet("unequal")


def both_send_first(me: Rank) -> None:
    """Everybody waits for a receiver who sends first, too: nobody is dead, so it is a fault."""
    group = me.group()
    work = dist.isend(_tensor(me), 1 - me.index, group)
    dist.irecv(_tensor(me), 1 - me.index, group)
    _fails(me, work, "the send")
    me.meet("both sent")


def links_in_a_circle(me: Rank) -> None:
    """The same, at first use: the call that needs the link does not return."""
    group = me.group()
    _expect_refusal(me, lambda: dist.isend(_tensor(me), 1 - me.index, group), "HcclSend")
    me.meet("in a circle")


def nobody_else(me: Rank) -> None:
    """One rank never calls the collective."""
    group = me.group()
    dist.all_reduce(_tensor(me), group=group)
    if me.index == 0:
        _fails(me, dist.all_reduce(_tensor(me), group=group, async_op=True), "all_reduce")
    me.meet("waited alone")


def twice_in_a_batch(me: Rank) -> None:
    """Two blocks one way for one pair of ranks."""
    other = 1 - me.index
    operations = [
        dist.P2POp(dist.isend if me.index == 0 else dist.irecv, _tensor(me), other)
        for _ in range(2)
    ]
    _expect_refusal(me, lambda: dist.batch_isend_irecv(operations), "HcclBatchSendRecv")
    me.meet("twice")


def never_joined(me: Rank) -> None:
    """One rank does not come into the communicator."""
    group = me.group()
    if me.index == 0:
        start = time.monotonic()
        _expect_refusal(me, lambda: dist.all_reduce(_tensor(me), group=group), "have not come: 1")
        me.check(time.monotonic() - start < 30, "it took too long")
    me.meet("waited for the other")


def one_device(me: Rank) -> None:
    """Two ranks on one device."""
    npu.set_device(0)
    x = torch.zeros(4).to("npu:0")
    _expect_refusal(me, lambda: dist.all_reduce(x), "same device")
    me.meet("refused")


def unsupported(me: Rank) -> None:
    """Reductions that the device does not have, asked for directly."""
    group = me.group()
    dist.all_reduce(_tensor(me), group=group)
    handle = ctypes.c_void_p(me.backend(group).get_hccl_comm(me.index))
    stream = ctypes.c_void_p(npu.current_stream().npu_stream)
    library = ctypes.CDLL("libhccl.so")
    for dtype, op in ((UINT8, SUM), (FP64, SUM), (INT16, PROD)):
        at = ctypes.c_void_p(_tensor(me, 64).data_ptr())
        code = library.HcclAllReduce(at, at, ctypes.c_uint64(8), dtype, op, handle, stream)
        me.check(code == NOT_SUPPORTED, f"type {dtype}, reduction {op}: code {code}")


def destroyed(me: Rank) -> None:
    """A communicator is destroyed under an operation: it ends, with an error."""
    group = me.group()
    _ends(me, dist.all_reduce(_tensor(me), group=group, async_op=True))
    if me.index == 0:
        work: Work = dist.all_reduce(_tensor(me), group=group, async_op=True)
        me.check(not work.is_completed(), "it ended alone")
        me.backend(group).abort_hccl_comm("test")  # destroys its communicators
        _fails(me, work, "the operation")
    me.meet("destroyed")


def slow(me: Rank) -> None:
    """NPUSIM_HCCL_SLOW: rank 1 begins each operation late."""
    dist.all_reduce(_tensor(me))
    npu.synchronize()
    start = time.monotonic()
    dist.all_reduce(_tensor(me))
    npu.synchronize()
    me.check(time.monotonic() - start > 0.25, "rank 1 was not late")


def dies(me: Rank) -> None:
    """NPUSIM_HCCL_DIES: rank 1 ends in the middle of its third operation; the others stay."""
    for _ in range(2):
        dist.all_reduce(_tensor(me))
    npu.synchronize()
    me.store.set(f"process {me.index}", str(os.getpid()))
    work: Work = dist.all_reduce(_tensor(me, 1_000_000), async_op=True)
    if me.index == 1:
        until(work.is_completed, "the end of the third operation")
        raise AssertionError("it outlived its third operation")
    other = int(me.store.get("process 1"))
    until(lambda: not Path(f"/proc/{other}").exists(), "the death of rank 1")
    _stays(me, work, "all_reduce")


def killed(me: Rank) -> None:
    """Rank 1 is killed in the middle of a long message; rank 0 stays."""
    size = 50_000_000
    if me.index == 0:
        work = dist.isend(_tensor(me, size), 1)
        until(lambda: me.store.check(["dying"]), "the death")
        _stays(me, work, "the send")
        return
    receive: Work = dist.irecv(_tensor(me, size), 0)
    me.check(not receive.is_completed(), "it ended too early")
    me.store.set("dying", "now")
    os.kill(os.getpid(), signal.SIGKILL)


def told_at_once(me: Rank) -> None:
    """What is told as soon as the ranks meet."""
    for program in (mismatches, first_uses, unequal, twice_in_a_batch, unsupported, destroyed):
        program(me)


def told_in_time(me: Rank) -> None:
    """What is told when an operation takes too long."""
    for program in (both_send_first, nobody_else):
        program(me)


def told_by_calls(me: Rank) -> None:
    """What is told when a call takes too long."""
    for program in (links_in_a_circle, never_joined):
        program(me)


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program
    for program in (told_at_once, told_in_time, told_by_calls, one_device, slow, dies, killed)
}
