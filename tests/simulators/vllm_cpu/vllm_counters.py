"""Counts what vLLM itself does, and keeps the counts in one file for each process.

A file is written anew with each change, so that a process which is killed has told what it did.
Wrapped functions keep their signatures, and do what they did.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from equipoise.integrations.vllm.counters import Counters

VARIABLE = "EQUIPOISE_VLLM_WATCH"
"""Names the folder; nothing is watched where it is unset."""
MARK = "_equipoise_watched"


class Watch:
    """The counts of this process; for any thread, since vLLM plans in one of its own.

    Attributes:
        counts: by name.
        maps: the slots' experts by layer, as installed after the last step; empty without EPLB.
        first: the same after the first step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.first: list[list[int]] = []
        self.maps: list[list[int]] = []

    def add(self, **counts: int) -> None:
        """Count, and keep it."""
        with self._lock:
            self.counts.update(counts)
            self._keep()

    def see_maps(self, state: Any) -> None:
        """Take the maps of a state of EPLB."""
        maps = [
            layer
            for model in state.model_states.values()
            for layer in model.physical_to_logical_map.tolist()
        ]
        with self._lock:
            self.first = self.first or maps
            self.counts["map_changes"] += bool(self.maps) and maps != self.maps
            self.maps = maps

    def _keep(self) -> None:
        """Write the file, whole."""
        record = {"rank": _rank(), "counts": self.counts, "first": self.first, "maps": self.maps}
        # By the process that writes: one that was forked writes a file of its own.
        path = self._folder / f"watch-{os.getpid()}.json"
        half = path.with_suffix(".half")
        half.write_text(json.dumps(record), encoding="utf-8")
        half.rename(path)


def watch_all() -> None:
    """Wrap what is counted, where `EQUIPOISE_VLLM_WATCH` names a folder. Twice is once."""
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return
    from vllm.distributed.eplb import eplb_state
    from vllm.distributed.parallel_state import GroupCoordinator

    watch, balancer = Watch(Path(folder)), eplb_state.EplbState
    _wrap(GroupCoordinator, "isend_tensor_dict", lambda handles, *_: _sent(watch, handles))
    _wrap(GroupCoordinator, "irecv_tensor_dict", lambda result, *_: _received(watch, result))
    _wrap(balancer, "rearrange", lambda *_: watch.add(rearrangements=1))
    _wrap(balancer, "step", lambda _, state, *__: _stepped(watch, state))
    _wrap(eplb_state, "_move_to_workspace", lambda *_: watch.add(layers=1))
    _wrap(
        eplb_state.DefaultEplbPolicy,
        "rebalance_experts",
        lambda _, __, load, *___: watch.add(policy=1, load=int(load.sum())),
    )
    _wrap(Counters, "add", lambda _, counters, *__: _keep_ours(Path(folder), counters))


def _keep_ours(folder: Path, counters: Counters) -> None:
    """What of Equipoise has run in this process."""
    path = folder / f"equipoise-{os.getpid()}.json"
    half = path.with_name(f"{path.name}.{threading.get_ident()}")
    half.write_text(json.dumps({"rank": _rank(), **counters.read()}), encoding="utf-8")
    half.rename(path)


def _sent(watch: Watch, handles: Any) -> None:
    watch.add(sent=1, sent_handles=len(handles))


def _received(watch: Watch, result: Any) -> None:
    watch.add(received=1, received_handles=len(result[1]))


def _stepped(watch: Watch, state: Any) -> None:
    watch.see_maps(state)
    watch.add(steps=1)


def _rank() -> int:
    """Of this process among all of an engine's; -1 where they do not know each other yet."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else -1


def _wrap(owner: Any, name: str, after: Callable[..., None]) -> None:
    """Call `after` with what a function returned, and with its arguments."""
    static = vars(owner)[name]
    stock = static.__func__ if isinstance(static, classmethod) else static
    if hasattr(stock, MARK):
        return

    @wraps(stock)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        result = stock(*arguments, **keywords)
        after(result, *arguments)
        return result

    setattr(counted, MARK, True)
    setattr(owner, name, classmethod(counted) if isinstance(static, classmethod) else counted)
