"""Four programs of one process that race, and what makes each of them right.

Prints one JSON object: of ROUNDS rounds, how many were correct, by case and variant. The races need
copies only, so that no operator hides them.
"""

import json
import sys
from collections.abc import Callable, Mapping

import torch

ROUNDS = 20
NUMBERS = 4096
"""int64 elements of each tensor: copies of several pages."""
STALE = -1
npu = torch.get_device_module("npu")
Round = Callable[[int], bool]


class Bench:
    """Tensors, streams, and the values of one round."""

    def __init__(self, device: int = 0) -> None:
        npu.set_device(device)
        self.side = npu.Stream()
        self.main = npu.current_stream()
        self.stale = pinned(STALE)
        self.sources = {k: pinned(k) for k in range(ROUNDS)}

    def on_device(self, source: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the device, with the values of `source`, or with stale ones, for certain."""
        out = torch.empty(NUMBERS, dtype=torch.int64, device="npu")
        out.copy_(self.stale if source is None else source, non_blocking=True)
        npu.synchronize()
        return out


def pinned(value: int) -> torch.Tensor:
    """Pinned host memory, every element `value`."""
    return torch.full((NUMBERS,), value, dtype=torch.int64).pin_memory()


def holds(tensor: torch.Tensor, value: int) -> bool:
    """Whether a host tensor is `value` everywhere."""
    return bool((tensor == value).all())


def consumer_without_wait(bench: Bench, right: bool) -> Round:
    """A copy to the device on one stream, read on another."""
    middle, target = bench.on_device(), bench.on_device()

    def play(k: int) -> bool:
        with npu.stream(bench.side):
            middle.copy_(bench.sources[k], non_blocking=True)
            copied = npu.Event()
            copied.record()
        if right:
            bench.main.wait_event(copied)
        target.copy_(middle)
        out = target.cpu()
        npu.synchronize()
        return holds(out, k)

    return play


def early_read(bench: Bench, right: bool) -> Round:
    """A copy to pinned memory that the host reads."""
    source, out = bench.on_device(), pinned(STALE)

    def play(k: int) -> bool:
        source.copy_(bench.sources[k], non_blocking=True)
        npu.synchronize()
        out.copy_(source, non_blocking=True)
        copied = npu.Event()
        copied.record()
        if right:
            copied.synchronize()
        correct = holds(out, k)
        npu.synchronize()
        return correct

    return play


def early_overwrite(bench: Bench, right: bool) -> Round:
    """A copy from pinned memory that the host writes again."""
    source, target = pinned(STALE), bench.on_device()

    def play(k: int) -> bool:
        source.fill_(k)
        target.copy_(source, non_blocking=True)
        copied = npu.Event()
        copied.record()
        if right:
            copied.synchronize()
        source.fill_(STALE)
        return holds(target.cpu(), k)

    return play


def early_reuse(bench: Bench, right: bool) -> Round:
    """A block that one stream still reads when its owner drops it and takes another of its size."""
    target = bench.on_device()

    def play(k: int) -> bool:
        source = bench.on_device(bench.sources[k])
        with npu.stream(bench.side):
            target.copy_(source)
            if right:
                source.record_stream(bench.side)
        del source
        other = torch.empty(NUMBERS, dtype=torch.int64, device="npu")
        other.copy_(bench.stale, non_blocking=True)
        bench.main.synchronize()
        bench.side.synchronize()
        return holds(target.cpu(), k)

    return play


CASES: Mapping[str, Callable[[Bench, bool], Round]] = {
    "consumer without a wait": consumer_without_wait,
    "pinned memory read early": early_read,
    "pinned memory overwritten early": early_overwrite,
    "block reused without record_stream": early_reuse,
}


def main() -> int:
    """Play every case, both variants; returns the exit code."""
    bench = Bench()
    correct_rounds = {}
    for name, case in CASES.items():
        for variant in ("right", "wrong"):
            play = case(bench, variant == "right")
            correct_rounds[f"{name}/{variant}"] = sum(play(k) for k in range(ROUNDS))
    print(json.dumps(correct_rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
