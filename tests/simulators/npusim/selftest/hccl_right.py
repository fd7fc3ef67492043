"""Communication that is right: every result is compared to the bit."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from npusim.selftest.hccl_rank import Rank, npu

REDUCED = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)
MOVED_TYPES = (*REDUCED, torch.uint8, torch.bool, torch.float64)
SIZES = (1, 3, 1000, 70_001)
"""Elements; the last does not fit into one ring."""
NO_PRODUCT = (torch.int16, torch.bfloat16)
"""Types that the 910B cannot multiply."""
FOLDS: dict[dist.ReduceOp.RedOpType, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


def data(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What a rank holds: every rank can say it of every other. Shape `[size]`, on the host."""
    seed = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (size,), generator=seed).bool()
    if dtype.is_floating_point:
        return torch.randn(size, generator=seed).to(dtype)
    return torch.randint(0, 100, (size,), generator=seed).to(dtype)


def fold(op: dist.ReduceOp.RedOpType, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction in the order of the ranks, rounded after each step."""
    result = parts[0].clone()
    for part in parts[1:]:
        result = FOLDS[op](result, part)
    return result


def all_of(me: Rank, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank holds."""
    return [data(rank, size, dtype) for rank in range(me.world)]


def reductions(me: Rank) -> None:
    """All-reduce, reduce, reduce-scatter: types, reductions, sizes, roots."""
    for dtype, op in product(REDUCED, FOLDS):
        if op == dist.ReduceOp.PRODUCT and dtype in NO_PRODUCT:
            continue
        for size in SIZES:
            parts = all_of(me, size, dtype)
            result = me.to_device(parts[me.index])
            dist.all_reduce(result, op)
            me.expect(result, fold(op, parts), f"all_reduce {dtype} {op} {size}")
        _reduce_to_one(me, dtype, op)
        _reduce_to_each(me, dtype, op)


def _reduce_to_one(me: Rank, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> None:
    parts = all_of(me, 100, dtype)
    for root in range(me.world):
        result = me.to_device(parts[me.index])
        dist.reduce(result, root, op)
        if me.index == root:
            me.expect(result, fold(op, parts), f"reduce {dtype} {op} to {root}")


def _reduce_to_each(me: Rank, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> None:
    for size in (1, 25_000):
        parts = all_of(me, size * me.world, dtype)
        result = torch.empty(size, dtype=dtype, device=me.device)
        dist.reduce_scatter_tensor(result, me.to_device(parts[me.index]), op)
        mine = fold(op, parts)[me.index * size : (me.index + 1) * size]
        me.expect(result, mine, f"reduce_scatter {dtype} {op} {size}")


def movements(me: Rank) -> None:
    """Broadcast, scatter, all-gather, all-to-all: every type moves, in every size."""
    for dtype, size in product(MOVED_TYPES, SIZES):
        parts = all_of(me, size, dtype)
        for root in range(me.world):
            result = me.to_device(parts[me.index])
            dist.broadcast(result, root)
            me.expect(result, parts[root], f"broadcast {dtype} {size} from {root}")
        result = torch.empty(size * me.world, dtype=dtype, device=me.device)
        dist.all_gather_into_tensor(result, me.to_device(parts[me.index]))
        me.expect(result, torch.cat(parts), f"all_gather {dtype} {size}")
        _scatter(me, dtype, size)
        _all_to_all(me, dtype, size)
        dist.barrier()


def _scatter(me: Rank, dtype: torch.dtype, size: int) -> None:
    root = me.world - 1
    pieces = data(root, size * me.world, dtype).chunk(me.world)
    result = torch.empty(size, dtype=dtype, device=me.device)
    dist.scatter(
        result, [me.to_device(piece) for piece in pieces] if me.index == root else None, src=root
    )
    me.expect(result, pieces[me.index], f"scatter {dtype} {size}")


def _all_to_all(me: Rank, dtype: torch.dtype, size: int) -> None:
    parts = all_of(me, size * me.world, dtype)
    result = torch.empty(size * me.world, dtype=dtype, device=me.device)
    dist.all_to_all_single(result, me.to_device(parts[me.index]))
    expected = torch.cat([part.chunk(me.world)[me.index] for part in parts])
    me.expect(result, expected, f"all_to_all {dtype} {size}")


def uneven(me: Rank) -> None:
    """All-to-all with splits that differ, some of them empty."""
    for scale in (1, 30_000):
        splits = [[(3 * a + 5 * b) % 4 * scale for b in range(me.world)] for a in range(me.world)]
        inputs = [data(a, sum(splits[a]), torch.float32) for a in range(me.world)]
        received = [splits[a][me.index] for a in range(me.world)]
        result = torch.empty(sum(received), device=me.device)
        dist.all_to_all_single(result, me.to_device(inputs[me.index]), received, splits[me.index])
        expected = torch.cat([torch.split(inputs[a], splits[a])[me.index] for a in range(me.world)])
        me.expect(result, expected, f"uneven all_to_all {scale}")


def messages(me: Rank) -> None:
    """First in, first out for each pair and way; sizes up to many rings; both ways at a time."""
    for size in (1, 100, 1_000_001):
        for low, high in ((0, 1), (me.world - 2, me.world - 1), (1, 0)):
            _three_in_order(me, low, high, size)
    me.meet("messages")


def _three_in_order(me: Rank, source: int, target: int, size: int) -> None:
    parts = [data(source, size, torch.int32, salt) for salt in range(3)]
    buffers = [torch.empty(size, dtype=torch.int32, device=me.device) for _ in parts]
    if me.index == source:
        works = [dist.isend(me.to_device(part), target) for part in parts]
    elif me.index == target:
        works = [dist.irecv(part, source) for part in buffers]
    else:
        return
    for work in works:
        assert work is not None
        work.wait()
    if me.index == source:
        npu.synchronize()
        return
    for number, (one, two) in enumerate(zip(buffers, parts, strict=True)):
        me.expect(one, two, f"message {number} of {size} from {source} to {target}")


def batches(me: Rank) -> None:
    """A ring in which everybody sends, and everybody with everybody, in one batch each."""
    for size in (1, 200_001):
        _batch(me, size, [(1, me.world - 1)])
        _batch(me, size, [(step, me.world - step) for step in range(1, me.world)])
    for _ in range(20):
        _batch(me, 10, [(1, me.world - 1)])


def _batch(me: Rank, size: int, steps: Sequence[tuple[int, int]]) -> None:
    mine = me.to_device(data(me.index, size, torch.uint8))
    part_by_source = {}
    operations = []
    for up, down in steps:
        source = (me.index + down) % me.world
        part_by_source[source] = torch.empty(size, dtype=torch.uint8, device=me.device)
        operations.append(dist.P2POp(dist.isend, mine, (me.index + up) % me.world))
        operations.append(dist.P2POp(dist.irecv, part_by_source[source], source))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for source, part in part_by_source.items():
        me.expect(part, data(source, size, torch.uint8), f"batch of {size} from {source}")


def groups(me: Rank) -> None:
    """Parts of the world at the same time, groups of one, and several groups of the same ranks."""
    halves = [me.group(list(range(half, me.world, 2))) for half in range(2)]
    singles = [me.group([rank]) for rank in range(me.world)]
    purposes = [me.group() for _ in range(4)]
    mine = [rank for rank in range(me.world) if rank % 2 == me.index % 2]
    for turn in range(10):
        half_sum = me.to_device(data(me.index, 500, torch.int64, turn))
        own_sum = half_sum.clone()
        dist.all_reduce(half_sum, group=halves[me.index % 2])
        dist.all_reduce(own_sum, group=singles[me.index])
        parts = [data(rank, 500, torch.int64, turn) for rank in mine]
        me.expect(half_sum, fold(dist.ReduceOp.SUM, parts), f"half a world, turn {turn}")
        me.expect(own_sum, data(me.index, 500, torch.int64, turn), f"alone, turn {turn}")
        _all_purposes(me, purposes, turn)


def _all_purposes(me: Rank, purposes: Sequence[dist.ProcessGroup], turn: int) -> None:
    tensors = [
        me.to_device(data(me.index, 300, torch.int32, salt)) for salt in range(len(purposes))
    ]
    works = [
        dist.all_reduce(one, group=group, async_op=True)
        for one, group in zip(tensors, purposes, strict=True)
    ]
    for salt, (one, work) in enumerate(zip(tensors, works, strict=True)):
        assert work is not None
        work.wait()
        parts = [data(rank, 300, torch.int32, salt) for rank in range(me.world)]
        me.expect(one, fold(dist.ReduceOp.SUM, parts), f"purpose {salt}, turn {turn}")


def replays(me: Rank) -> None:
    """A captured all-reduce sees the input of each replay."""
    tensor = torch.zeros(5000, device=me.device)
    dist.all_reduce(tensor)  # builds the links: none may be built in a capture
    graph = npu.NPUGraph()
    with npu.graph(graph):
        dist.all_reduce(tensor)
    for turn in range(5):
        tensor.copy_(data(me.index, 5000, torch.float32, turn))
        graph.replay()
        parts = [data(rank, 5000, torch.float32, turn) for rank in range(me.world)]
        me.expect(tensor, fold(dist.ReduceOp.SUM, parts), f"replay {turn}")


def everything(me: Rank) -> None:
    """All of the above."""
    for program in (reductions, movements, uneven, messages, batches, groups, replays):
        program(me)


def alone(me: Rank) -> None:
    """What one rank can do."""
    for program in (reductions, movements, uneven, replays):
        program(me)


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program for program in (everything, alone, messages)
}
