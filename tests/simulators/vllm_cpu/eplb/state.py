"""The state of vLLM's EPLB in a model runner that does not make one."""

from typing import Any

from vllm.model_executor.models.interfaces import get_mixture_of_experts_model
from vllm.v1.worker import gpu_model_runner


def build_state(runner: Any) -> None:
    """Build `runner.eplb_state`, and start its thread where EPLB is asynchronous.

    The hole: `CPUModelRunner.load_model` is its own, and leaves out all that
    `GPUModelRunner.load_model` does for EPLB; the first step then fails in the router with "EPLB
    requires expert_load_view != None". The class is looked up where the runner looks it up.
    """
    model = get_mixture_of_experts_model(runner.model)
    if model is None:
        raise ValueError(f"{runner.model_config.model} has no experts to balance")
    state = gpu_model_runner.EplbState(runner.parallel_config, runner.device)
    state.device_index = 0  # The thread asserts that there is one.
    state.add_model(model, runner.model_config)
    runner._moe_model = model
    runner.eplb_state = state
    if state.is_async:
        state.start_async_loop()
