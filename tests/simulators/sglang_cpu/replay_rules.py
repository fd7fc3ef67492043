"""A case for a pool of ranks: SGLang's plans and dispatch, of which replay has models."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.eplb import expert_location, expert_location_dispatch
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.eplb.lplb_solver import LPLBSolver
from sglang.test.kernels.lplb import solve_ipm_torch_reference

from equipoise.hal.communicator import Fabric
from sglang_cpu.eplb_manager import MODEL_CONFIG, configuration

GIVEN_UP = 0.5
"""Value of all unknowns where the solver does not converge."""


def answer(
    fabric: Fabric, address: str, cases: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What SGLang plans, and where its ranks send rows, one process answering for each rank.

    Args:
        fabric: of the case; unused.
        address: where ranks would meet; unused.
        cases: of each, `load` (layers, experts) to plan for, or None and `placement` (layers,
            slots) to start with; `experts`, `slots`, `ranks`, `nodes`, `groups` (or None),
            `dispatch` and `backend` in SGLang's words, `asked` (ranks), `ids` (tokens, top_k).

    Returns:
        Of each case, `placement` (layers, slots), and `slots` (asked, layers, tokens, top_k).
    """
    return [one_answer(case) for case in cases]


def one_answer(case: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of one case."""
    slots, placement = [], None
    for rank in case["asked"]:
        metadata = metadata_of(case, rank)
        placement = metadata.physical_to_logical_map.tolist()
        slots.append([routed(metadata, case, layer) for layer in range(metadata.num_layers)])
    return {"placement": placement, "slots": slots}


def metadata_of(case: Mapping[str, Any], rank: int) -> ExpertLocationMetadata:
    """SGLang's own, of a rank."""
    layers = len(case["placement"] if case["load"] is None else case["load"])
    numbers = ModelConfigForExpertLocation(layers, case["experts"], case["groups"])
    with ExitStack() as stack:
        stack.enter_context(configured(case, rank, numbers))
        if case["load"] is None:
            made = ExpertLocationMetadata.init_by_mapping(MODEL_CONFIG, case["placement"], rank)
        else:
            load = torch.tensor(case["load"], dtype=torch.int32)
            made = ExpertLocationMetadata.init_by_eplb(MODEL_CONFIG, load)
    metadata: ExpertLocationMetadata = made
    return metadata


def configured(
    case: Mapping[str, Any], rank: int, numbers: ModelConfigForExpertLocation | None = None
) -> ExitStack:
    """SGLang's modules as a rank of the case has them."""
    control = SimpleNamespace(rank=rank, size=case["ranks"])
    stand_in: Any = SimpleNamespace(control=control)
    redundant = case["slots"] - case["experts"]
    told: Any = numbers
    stack = ExitStack()
    stack.enter_context(
        configuration(
            stand_in, told, redundant, None, case["dispatch"], case["backend"], case["nodes"]
        )
    )
    stack.enter_context(patch.object(torch.distributed, "get_rank", lambda: rank))
    return stack


def routed(metadata: ExpertLocationMetadata, case: Mapping[str, Any], layer: int) -> Any:
    """(tokens, top_k): the slots of the case's rows on one layer."""
    with configured(case, 0):
        expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
        info = expert_location_dispatch.ExpertLocationDispatchInfo.init_new(layer)
        expert_location.set_global_expert_location_metadata(None, allow_overwrite=True)
    ids = torch.tensor(case["ids"])
    return expert_location_dispatch.topk_ids_logical_to_physical(ids, info).tolist()


def solve(fabric: Fabric, address: str, cases: Sequence[Mapping[str, Any]]) -> list[Any]:
    """How SGLang's reference of its linear solver divides batches.

    Args:
        fabric: of the case; unused.
        address: unused.
        cases: of each, `placement` (slots,), `load` (experts,), `ranks`.

    Returns:
        Of each case, the part of all rows that goes to each slot, (slots,); None where it gives up.
    """
    return [solved(**case) for case in cases]


def solved(placement: list[int], load: list[int], ranks: int) -> list[float] | None:
    """As `solve`, of one batch; inputs of the solver are made as `lp_prep.cuh` makes them."""
    held, counts = torch.tensor(placement), torch.tensor(load, dtype=torch.float32)
    found = [torch.nonzero(held == expert).flatten() for expert in range(len(load))]
    table = torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-1)
    # Compiling the device's solver is left out; the rest of the constructor runs on the CPU.
    with patch("sglang.kernels.ops.lplb.torch_solver.warmup"):
        solver = LPLBSolver(held, table, ranks)
    counts = counts / counts.sum()
    single = counts[solver.log_single]
    bounds = torch.cat([counts[solver.log_replicated], -(solver.B1 @ single)])
    big_m = bounds - solver._A_base_row_sum
    solution = solve_ipm_torch_reference(
        torch.hstack([solver.A_base, big_m[:, None]]), bounds, solver.c_vec
    )
    if torch.all(solution == GIVEN_UP):
        return None
    parts = torch.zeros(len(held))
    parts[solver.phy_single] = single
    parts[solver.phy_replicated] = solution[: solver.num_red_phy].clamp(min=0)
    # Rows draw among an expert's replicas by ratio, whatever the sum is.
    whole = torch.zeros(len(load)).scatter_add_(0, held, parts)[held]
    return (parts / whole * counts[held]).nan_to_num().tolist()
