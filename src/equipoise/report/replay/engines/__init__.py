"""The balancers of engines, as far as replay has to know them: plans, dispatch, cadence."""

from collections.abc import Callable, Mapping

from equipoise.report.replay.engine_model import EngineModel
from equipoise.report.replay.engines.sglang import sglang_model
from equipoise.report.replay.engines.tensorrt_llm import tensorrt_llm_model
from equipoise.report.replay.engines.vllm import VLLM
from equipoise.report.replay.engines.vllm_ascend import vllm_ascend_model

LAYER_UPDATES_PER_STEP = 2
"""Of TensorRT-LLM: what its examples set."""
ENGINES: Mapping[str, Callable[[int, int], EngineModel]] = {
    "vllm": lambda layers, nodes: VLLM,
    "sglang": lambda layers, nodes: sglang_model(nodes),
    "vllm-ascend": lambda layers, nodes: vllm_ascend_model(layers),
    "trtllm": lambda layers, nodes: tensorrt_llm_model(layers, LAYER_UPDATES_PER_STEP),
}
"""By name, from the number of layers and of nodes. Planner and rules of a model may share what the
engine shares, so every candidate has one of its own."""
