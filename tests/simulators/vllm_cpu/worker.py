"""The CPU's worker, with what is missing after its model is loaded."""

from hashlib import sha256
from typing import Any

# Importing vLLM's worker loads a library that has to come before all others.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip
import torch
from vllm.distributed import get_pp_group

from vllm_cpu.eplb.routing import route_on_the_host
from vllm_cpu.eplb.state import build_state
from vllm_cpu.eplb.streams import stand_in_for_streams
from vllm_cpu.experts import follow_expert_map
from vllm_cpu.missing_features import Hole, filled


class FilledWorker(CPUWorker):
    """Fills holes at two moments: before anything of a model exists, and when it is loaded."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        holes = filled()
        if Hole.EXPERT_MAP in holes:
            follow_expert_map()
        if Hole.EPLB_ROUTING in holes:
            route_on_the_host()
        if Hole.EPLB_STREAMS in holes:
            stand_in_for_streams()
        super().__init__(*arguments, **keywords)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load, then make what the CPU's model runner leaves out."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.parallel_config.enable_eplb:
            self.loaded_digests = expert_digests(self.model_runner.model)
        holes = filled()
        if Hole.RECEIVE_BUFFER in holes:
            allocate_received(self.model_runner)
        if Hole.EPLB_STATE in holes and self.parallel_config.enable_eplb:
            build_state(self.model_runner)

    def expert_slot_digests(self) -> dict[str, list[list[str]]]:
        """For `collective_rpc`: digests of this rank's slots by layer, `loaded` and `now`."""
        return {"loaded": self.loaded_digests, "now": expert_digests(self.model_runner.model)}


def expert_digests(model: Any) -> list[list[str]]:
    """A digest of the weights in every slot of this rank, by layer."""
    return [
        [
            sha256(
                b"".join(tensor[slot].view(torch.uint8).numpy().tobytes() for tensor in tensors)
            ).hexdigest()
            for slot in range(model.num_local_physical_experts)
        ]
        for tensors in (list(layer.get_expert_weights()) for layer in model.moe_layers)
    ]


def allocate_received(runner: Any) -> None:
    """Allocate the tensors that a later stage of a pipeline copies what it receives into.

    The hole: only a dummy run allocates them, and the CPU's runner makes none when nothing is
    compiled (`warming_up_model` returns at once); the first real step then fails at
    `assert self.intermediate_tensors is not None`.
    """
    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
