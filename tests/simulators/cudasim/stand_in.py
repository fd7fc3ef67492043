"""Puts the simulated NPU where the CUDA backend looks for torch.cuda and the driver."""

from types import SimpleNamespace
from typing import Any

from cudasim import driver
from cudasim.kernels import OperatorKernels
from equipoise.backends.ascend import npu_runtime as npu_native
from equipoise.backends.cuda import cuda_runtime, host_flags, kernel_launcher
from equipoise.hal.capabilities import Available, Probe


def install() -> None:
    """For the whole process; nothing is undone."""
    stand_in: dict[str, Any] = {
        "cuda": torch_cuda,
        "driver": lambda: driver,
        "probe": probe,
        "stream_memory": lambda: "",
        "shared_queues": lambda: "",  # each of the simulated device's streams is a queue
    }
    for name, value in stand_in.items():
        setattr(cuda_runtime, name, value)
    vars(cuda_runtime.RUNTIME).update(device_type="npu", on_device=npu_native.RUNTIME.on_device)
    host_flags._handle = lambda stream: stream.npu_stream
    kernel_launcher.make_kernels = lambda device: OperatorKernels()


def probe() -> Probe:
    """As the simulated NPUs say."""
    answer = npu_native.probe()
    return Available(f"stand-in: {answer.detail}") if isinstance(answer, Available) else answer


def torch_cuda() -> Any:
    """Torch.npu by the names of torch.cuda."""
    npu = npu_native.npu()
    return SimpleNamespace(
        Stream=npu.Stream,
        Event=npu.Event,
        CUDAGraph=npu.NPUGraph,
        current_stream=npu.current_stream,
        is_current_stream_capturing=npu.is_current_stream_capturing,
        mem_get_info=npu.mem_get_info,
        get_device_properties=lambda index: SimpleNamespace(),
        device_count=npu.device_count,
        is_initialized=lambda: True,
    )
