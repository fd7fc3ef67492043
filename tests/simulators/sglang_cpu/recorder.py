"""Cases for a pool of ranks: what SGLang itself writes of routing, on the host.

Its expert distribution recorder dumps what it gathered, and its capturer of routed experts returns
those of a request, encoded as its detokenizer does. The model is a list of expert ids; SGLang's
configuration is a stand-in.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.eplb import expert_distribution
from sglang.srt.eplb.expert_distribution import ExpertDistributionRecorder
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.state_capturer import base
from sglang.srt.state_capturer.base import BaseTopkCapturer

from equipoise.hal.communicator import Fabric

DUMP_FOLDER = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
MOST_TOKENS = 64
CPU = SimpleNamespace(device="cpu")


def dump(fabric: Fabric, address: str, folder: str, mode: str, **case: Any) -> None:
    """Record passes in a mode, and have the recorder dump its file.

    Args:
        fabric: of the case, for the rank.
        address: unused; every case has one.
        folder: where the file comes.
        mode: `per_pass` or `per_token`.
        case: `passes`, by pass and rank the slots (layers, tokens, top_k); `slot_map`, the expert
            of each slot (layers, slots).
    """
    rank = fabric.control.rank
    slot_map = torch.tensor(case["slot_map"])
    layers, slots = slot_map.shape
    metadata: Any = SimpleNamespace(
        num_layers=layers,
        num_physical_experts=slots,
        num_local_physical_experts=slots,
        num_logical_experts=int(slot_map.max()) + 1,
        physical_to_logical_map=slot_map,
        ep_size=1,
    )
    with configuration(mode), patch.dict(os.environ, {DUMP_FOLDER: folder}):
        recorder = ExpertDistributionRecorder.init_new(metadata, rank)
        recorder.start_record()
        for number, of_ranks in enumerate(case["passes"]):
            chosen = torch.tensor(of_ranks[rank], dtype=torch.int32)
            with recorder.with_forward_pass(number, batch_of(chosen.shape[1])):
                for layer in range(layers):
                    with recorder.with_current_layer(layer):
                        recorder.on_select_experts(topk_ids=chosen[layer])
        recorder.stop_record()
        recorder.dump_record(output_mode="file")


def respond(fabric: Fabric, address: str, ids: Any) -> dict[str, Any]:
    """The response to one request whose tokens, but the last, were routed so: (tokens, layers,
    top_k)."""
    routed = torch.tensor(ids, dtype=torch.int32)
    tokens, layers, top_k = routed.shape
    with patch.object(base, "ALLOC_MEMORY_FUNCS", {"cpu": not_pinned}):
        capturer = BaseTopkCapturer(MOST_TOKENS, MOST_TOKENS, layers, top_k, "cpu", "routed")
    for layer in range(layers):
        capturer.capture(layer, routed[:, layer])
    places = torch.randperm(MOST_TOKENS)[: tokens + 1]
    batch: Any = SimpleNamespace(out_cache_loc=places[:-1], out_cache_loc_virtual=None)
    capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
    pool: Any = SimpleNamespace(req_to_token=places[None])
    returned = capturer.get_topk(0, tokens + 1, pool)
    (encoded,) = DetokenizerManager._b64_encode_per_request([returned]) or [None]
    return {
        "text": "",
        "meta_info": {
            "id": "a",
            "prompt_tokens": tokens,
            "completion_tokens": 1,
            "routed_experts": encoded,
        },
    }


def not_pinned(shape: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """Memory of the host that no device is told of."""
    return torch.empty(shape, dtype=dtype)


def batch_of(tokens: int) -> Any:
    """What the recorder reads of a batch of one prompt."""
    return SimpleNamespace(
        input_ids=torch.arange(tokens),
        positions=torch.arange(tokens),
        extend_seq_lens_cpu=[tokens],
        forward_mode=ForwardMode.EXTEND,
    )


@contextmanager
def configuration(mode: str) -> Iterator[None]:
    """SGLang as configured to record in this mode, without a device and without metrics."""
    moe = SimpleNamespace(
        expert_distribution_recorder_mode=mode,
        moe_a2a_backend="none",
        deepep_mode="normal",
        expert_balancedness_report_mode=None,
    )
    execution = SimpleNamespace(moe=moe, overlap=SimpleNamespace(enable_two_batch_overlap=False))
    schedule = SimpleNamespace(chunked_prefill_size=MOST_TOKENS)
    stand_ins = {
        "get_exec": lambda: execution,
        "get_schedule": lambda: schedule,
        "get_device_namespace": lambda: CPU,
        "get_device": lambda: "cpu",
        "get_platform": lambda: SimpleNamespace(is_hip=False),
        "reports_expert_balancedness": lambda: False,
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(expert_distribution, name, stand_in))
        yield
