"""Our re-write of another engine's kernel, held against the kernel itself where it is installed."""

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from cuda_clock import MICRO, in_turns, scaled
from cuda_kernels import TOP_K, Batch, Bench, Case, Sizes, baseline, baseline_arguments, launched
from cuda_place import Place
from torch import Tensor

ENGINE, NAME = "vllm", "eplb_map_to_physical_and_record"
MODULES = (
    "vllm.model_executor.layers.fused_moe.router.base_router",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.fused_moe.layer",
)
"""Where it is, and where it was before."""
TAKES = (
    "topk_ids",
    "expert_load_view",
    "logical_to_physical_map",
    "logical_replica_count",
    "record_enabled",
    "num_unpadded_tokens",
)
"""What it takes, in any order; another one would be another kernel."""
ABSENT = "vLLM is not installed: the baseline was not checked against it"
PADDED = 3
"""Rows at the end of a batch that are padding, where there are more."""
Figures = dict[str, Any]
Kernel = Callable[..., Tensor]


def checked(place: Place, sizes: Sizes) -> Figures:
    """Whether our baseline does what the kernel does, and how long that takes; or why not."""
    ours = baseline()
    if find_spec(ENGINE) is None:
        return {"said": ABSENT, "same": None}
    if ours is None or not place.on_device:
        return {"said": "the baseline's kernel is not at hand here", "same": None}
    theirs = found()
    if isinstance(theirs, str):
        return {"said": theirs, "same": None}
    bench = Bench(Case.of(place, 1), sizes)
    try:
        rows = [_compared(bench, theirs, ours.hash_and_count, tokens) for tokens in sizes.others]
    except Exception as error:  # of another's code, which we do not know
        return {"said": f"vLLM's kernel raised: {type(error).__name__}: {error}", "same": None}
    return {
        "said": f"vLLM {version()}",
        "same": all(row["same"] for row in rows),
        "rows": rows,
    }


def found() -> Kernel | str:
    """The kernel; or what is wrong with it, in words."""
    for module in MODULES:
        try:
            function = getattr(import_module(module), NAME, None)
        except Exception as error:  # an engine that does not fit the machine raises anything
            return f"vLLM does not import: {type(error).__name__}: {error}"
        if function is not None:
            return _fitting(function)
    return f"vLLM {version()} has no {NAME} where it is looked for"


def version() -> str:
    """Of the engine."""
    return str(getattr(import_module(ENGINE), "__version__", "of unknown version"))


def _fitting(function: Kernel) -> Kernel | str:
    takes = tuple(inspect.signature(function).parameters)
    if set(takes) == set(TAKES):
        return function
    return f"vLLM {version()}: {NAME} takes {', '.join(takes)}, and {', '.join(TAKES)} is known"


def _compared(bench: Bench, theirs: Kernel, ours: Callable[..., object], tokens: int) -> Figures:
    """Both on one batch, some of whose rows are padding, and one of whose ids is no expert."""
    batch = Batch.of(bench.case, tokens)
    batch.rows.fill_(max(1, tokens - PADDED))
    batch.ids[-1] = -1
    told = _arguments(bench.case, batch)
    bench.place.settle()
    bench.stream.launch(lambda: ours(*baseline_arguments(bench.case, batch)))
    bench.place.settle()
    answer: list[Tensor] = []
    bench.stream.launch(lambda: answer.append(theirs(**told)))
    bench.place.settle()
    same = torch.equal(answer[0].reshape(-1).to(torch.int32), batch.slots) and torch.equal(
        told["expert_load_view"].to(torch.int32), batch.load
    )
    timed = {
        "theirs": bench.timed(lambda: bench.stream.launch(lambda: theirs(**told))),
        "ours": bench.timed(launched(bench.stream, ours, baseline_arguments(bench.case, batch))),
    }
    times = in_turns(timed, bench.sizes.rounds)
    micro = {name: scaled(values, MICRO) for name, values in times.items()}
    return {"tokens": tokens, "same": bool(same), "microseconds": micro}


def _arguments(case: Case, batch: Batch) -> dict[str, Tensor]:
    """As the engine itself keeps them: maps in int64, the load in int32."""
    flag = case.on_device(np.array(True))
    return {
        "topk_ids": batch.ids.view(-1, TOP_K),
        "expert_load_view": torch.zeros_like(batch.load),
        "logical_to_physical_map": case.replicas.slots.long(),
        "logical_replica_count": case.replicas.copies.long(),
        "record_enabled": flag,
        "num_unpadded_tokens": batch.rows[0],
    }
