"""Counts what one rebalance runs through: files, hops between them, functions, classes, threads.

    python tools/trace_rebalance.py [--functions]
    PYTHONPATH=tests/simulators .tox/engines/bin/python tools/trace_rebalance.py --vllm

Two ranks on the CPU serve one layer, as in `examples/nano.py`. Rank 0 notes every function of the
project that is called, on any thread, from the first boundary of a rebalance to its end. Functions
that other steps call too (routing, reading, the boundary itself) are counted apart. A hop is a pair
of files of which one calls the other: what a reader has to follow.

`--vllm` traces vLLM's own synchronous rebalance, for comparison: its default policy, the exchange
of weights and the commit of the maps. What calls these three, and the thread of the asynchronous
rebalance, need a GPU and are not in the figures.
"""

import argparse
import os
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
STEPS, INTERVAL = 40, 8
Call = tuple[str, str, str, str]
"""File, qualified name of the function, name of the thread, file of the caller (empty: none of the
project's)."""


class Recorder:
    """Notes calls of the project's functions while it is switched on.

    Attributes:
        package: whose functions count.
        calls: of the phase that is being recorded.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.calls: set[Call] | None = None
        self._files: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See `sys.setprofile`."""
        if event != "call" or (calls := self.calls) is None:
            return
        file = self._file(frame.f_code)
        if file is None:
            return
        caller = frame.f_back
        # Calls through the standard library, such as those of a thread pool, count too.
        while caller is not None and self._file(caller.f_code) is None:
            caller = caller.f_back
        caller_file = "" if caller is None else self._file(caller.f_code) or ""
        name = frame.f_code.co_qualname
        calls.add((file, name, threading.current_thread().name, caller_file))

    def _file(self, code: CodeType) -> str | None:
        """The file below the package, or None for somebody else's."""
        if (file := self._files.get(code, "")) == "":
            file = self._files[code] = _own(code.co_filename, self.package)
        return file


def _own(name: str, package: str) -> str | None:
    """The path below the package, or None for somebody else's file."""
    parts = Path(name).parts
    if package not in parts or not name.endswith(".py"):
        return None
    return "/".join(parts[len(parts) - parts[::-1].index(package) :])


def serve(recorder: Recorder) -> tuple[set[Call], set[Call]]:
    """One rank: the calls of steps without a rebalance, and of those with one."""
    import torch

    import equipoise

    shape = equipoise.ExpertShape(layers=1, experts=8, slots=12, ranks=2)
    config = equipoise.BalancerConfig(window_size=4, step_interval=INTERVAL, sub_window=4)
    popularity = torch.tensor([1.0, 1.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0])
    quiet_calls: set[Call] = set()
    busy_calls: set[Call] = set()
    with equipoise.connect() as ranks:
        mine = slice(ranks.rank * shape.slots_per_rank, (ranks.rank + 1) * shape.slots_per_rank)
        experts = equipoise.initial_placement(shape)[0].tolist()[mine]
        weights = torch.stack([torch.full((16, 16), float(number)) for number in experts])
        registry = equipoise.ModelRegistry("traced", shape.slots_per_rank, shape.experts)
        registry.register(0, w=weights)
        model = registry.finalize([("layers.0.w", weights)])
        with equipoise.open_balancer(ranks, model, config) as balancer:
            chance = torch.Generator().manual_seed(ranks.rank)

            def forward(step: int, expert_ids: torch.Tensor) -> None:
                with balancer.reading_slots(0, step):
                    balancer.router(0).route(step, expert_ids)

            for step in range(STEPS):
                report_count = len(balancer.reports)
                if report_count:
                    break
                # The first rebalance begins at the boundary behind the first interval.
                recorder.calls = quiet_calls if step < INTERVAL else busy_calls
                expert_ids = torch.multinomial(
                    popularity.expand(512, -1), 2, generator=chance
                ).int()
                with balancer.step(step):
                    ranks.compute.launch(partial(forward, step, expert_ids))
                ranks.compute.synchronize(ranks.deadline)
            recorder.calls = None
            reports = list(balancer.reports)
    if not reports or reports[0].outcome != "committed":
        raise SystemExit(f"no rebalance was committed in {STEPS} steps: {reports}")
    return quiet_calls, busy_calls


def rearrange_in_vllm(recorder: Recorder) -> tuple[set[Call], set[Call]]:
    """One rank: no calls of other steps, and those of one synchronous rebalance of vLLM."""
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist
    from vllm.distributed.eplb import eplb_state
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    dist.init_process_group("gloo")
    experts, slots = 8, 12
    old = (torch.arange(slots) % experts)[None]
    mine = old[0].chunk(2)[dist.get_rank()]
    weights = [[mine[:, None] * torch.ones(16, dtype=torch.float64)]]
    model = SimpleNamespace(
        physical_to_logical_map=old.clone(),
        logical_to_physical_map=torch.full((1, experts, slots), -1),
        logical_replica_count=torch.zeros(1, experts, dtype=torch.int64),
    )
    load = torch.tensor([[1.0, 1.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0]])
    buffer = [torch.empty_like(each) for each in weights[0]]
    recorder.calls = calls = set[Call]()
    new = DefaultEplbPolicy.rebalance_experts(load, slots, 1, 1, 2, old)
    communicator = TorchDistNcclEplbCommunicator(dist.group.WORLD)
    rearrange_expert_weights_inplace(old, new, weights, buffer, dist.group.WORLD, communicator)
    eplb_state._commit_eplb_maps(model, new)
    recorder.calls = None
    if torch.equal(old, new) or not torch.equal(model.physical_to_logical_map, new):
        raise SystemExit("vLLM moved nothing, or did not commit")
    dist.destroy_process_group()
    return set(), calls


def describe(calls: set[Call]) -> str:
    """One line of figures."""
    files = {file for file, *_ in calls}
    functions = {(file, name) for file, name, *_ in calls}
    hops = {(caller, file) for file, _, _, caller in calls if caller not in ("", file)}
    classes = {
        (file, name.split(".")[0])
        for file, name in functions
        if "." in name and name.split(".")[0][:1].lstrip("_")[:1].isupper()
    }
    threads = {thread for _, _, thread, _ in calls}
    return (
        f"{len(files)} files, {len(hops)} hops, {len(functions)} functions, "
        f"{len(classes)} classes, {len(threads)} threads"
    )


def main() -> int:
    """Start the other rank, trace this one, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--functions", action="store_true", help="list the functions, by file")
    parser.add_argument("--vllm", action="store_true", help="trace vLLM's rebalance instead")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        return subprocess.call([sys.executable, *run, *sys.argv[1:]])
    recorder = Recorder("vllm" if options.vllm else "equipoise")
    if is_first := os.environ["RANK"] == "0":
        threading.setprofile(recorder)
        sys.setprofile(recorder)
    try:
        quiet_calls, busy_calls = rearrange_in_vllm(recorder) if options.vllm else serve(recorder)
    finally:
        sys.setprofile(None)
    if not is_first:
        return 0
    quiet_functions = {(file, name) for file, name, *_ in quiet_calls}
    own = {call for call in busy_calls if call[:2] not in quiet_functions}
    print(f"one rebalance:        {describe(busy_calls)}")
    print(f"not in other steps:   {describe(own)}")
    folders = Counter("/".join(file.split("/")[:-1]) for file in {call[0] for call in busy_calls})
    for folder, count in sorted(folders.items()):
        print(f"  {folder:40} {count} files")
    if options.functions:
        for file in sorted({call[0] for call in own}):
            print(file)
            for name in sorted({call[1] for call in own if call[0] == file}):
                print(f"    {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
