"""What takes the memory of buffers that were dropped in flight, and tells who still wrote to it."""

from torch import Tensor

from equipoise.hal.conformance.bench import Bench, demand, told

JUNK = 0x3C


def junk_for(bench: Bench, *dropped: int) -> list[Tensor]:
    """Buffers of these sizes (bytes): they take the memory of what was dropped, if it is free."""
    bench.churn()
    return [bench.filled((nbytes,), JUNK) for nbytes in dropped]


def untouched(clause: str, junk: list[Tensor]) -> None:
    """Demand that nobody has written to memory that was not his any more."""
    for buffer in junk:
        late = int((told(buffer) != JUNK).sum())
        demand(clause, late == 0, f"{late} bytes written to memory that was freed in flight")
