"""The ways in which vLLM is run, as cases: each is to say what the reference says."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engines.vllm.runs.case import Case
from engines.vllm.runs.prompts import TOKENS
from engines.vllm.runs.reference_tokens import Reference
from vllm_cpu import runner
from vllm_cpu.missing_features import PARALLEL, SECOND_RUNNER, STOCK_EPLB, Hole

INTERVAL = 8
"""Steps between two rearrangements."""
ROUNDS = 4
"""In which everything is asked, where experts move."""
TWO_BATCHES = 3
"""Sequences at once, of six: a pipeline of two stages then has two micro-batches in flight."""

SHARED_STAGE = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
"""Two ranks a stage, half of the experts on each."""


def rearrangements(rounds: int) -> int:
    """That each rank has to go through at least; some steps pass before the first, and the last."""
    return rounds * TOKENS // INTERVAL - 3


REARRANGEMENTS = rearrangements(ROUNDS)


def single(reference: Reference) -> Case:
    """One process, nothing of vLLM touched."""
    return Case(reference.folder, reference.prompts, TOKENS)


def pipeline(reference: Reference, sequences: int = 8) -> Case:
    """Two stages."""
    engine = {"pipeline_parallel_size": 2, "max_num_seqs": sequences}
    return _parallel(reference, engine)


def expert_parallel(reference: Reference) -> Case:
    """Two ranks, half of the experts on each."""
    return _parallel(reference, {"tensor_parallel_size": 2, "enable_expert_parallel": True})


def balanced(reference: Reference, **settings: Any) -> Case:
    """The same with vLLM's own EPLB, two redundant experts, and a rearrangement every 8 steps."""
    case = expert_parallel(reference)
    steps = {"window_size": INTERVAL, "step_interval": INTERVAL}
    eplb = {**steps, "num_redundant_experts": 2, **settings}
    engine = {**case.engine, "additional_config": {"vllm_cpu": {"eplb": eplb}}}
    return replace(case, engine=engine, holes=PARALLEL | STOCK_EPLB, rounds=ROUNDS)


def on_second_runner(case: Case) -> Case:
    """The same under the model runner of GPUs, which brings its own state and its own buffers."""
    unneeded_holes = {Hole.EPLB_STATE, Hole.RECEIVE_BUFFER}
    environment = {**case.environment, **runner.ENVIRONMENT}
    return replace(case, holes=case.holes - unneeded_holes | SECOND_RUNNER, environment=environment)


def ours(case: Case, **parts: Any) -> Case:
    """The same case with parts of Equipoise; where its engine balances, vLLM's does not."""
    stays = case.holes - STOCK_EPLB | {Hole.EPLB_STATE}
    holes = stays if "eplb" in parts else case.holes
    return replace(case, plugin=parts, holes=holes)


def data_parallel(reference: Reference, **engine: Any) -> Case:
    """Two replicas behind one server, asked by streaming clients."""
    engine = {"data_parallel_size": 2, **engine}
    return replace(single(reference), engine=engine, front="server", rounds=2)


def routed(reference: Reference, routing: Any, **engine: Any) -> Case:
    """Two replicas with two slots each, six prompts, and our routing of requests between them."""
    case = data_parallel(reference, max_num_seqs=2, **engine)
    return replace(case, plugin={"dp_load_balancer": routing}, rounds=3)


def proxied(reference: Reference) -> Case:
    """The same with nothing in the server, and the proxy in front of it."""
    return replace(data_parallel(reference, max_num_seqs=2), front="proxied", rounds=3)


def data_parallel_balanced(reference: Reference, **settings: Any) -> Case:
    """Two data-parallel ranks, half of the experts on each, with vLLM's own EPLB."""
    case = balanced(reference, **settings)
    engine = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "additional_config": case.engine["additional_config"],
    }
    return replace(case, engine=engine, front="server")


def _parallel(reference: Reference, engine: Mapping[str, Any]) -> Case:
    engine = {"distributed_executor_backend": "mp", **engine}
    return replace(single(reference), engine=engine, holes=PARALLEL, rounds=2)
