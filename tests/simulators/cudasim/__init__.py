"""The CUDA backend over the simulated NPU driver, for machines without a GPU: tests only.

    PYTHONPATH=tests python -m npusim --schedule lazy -- \\
        python -m equipoise conformance --backend cudasim:BACKEND

torch.npu plays torch.cuda, call for call, and the simulated device's streams wait for words of the
host as a GPU's do. So what runs is the backend's own code, on schedules that look for its races.
What cannot run here is the vendor's: kernels, the driver, NCCL; routing is done by operators. For
NCCL there is a stand-in: `cudasim.nccl:NCCL`.
"""

from equipoise.hal.accelerator import Backend


def __getattr__(name: str) -> Backend:
    """`BACKEND`: whoever asks for it has the stand-in put in place, for the whole process."""
    if name != "BACKEND":
        raise AttributeError(name)
    from cudasim.stand_in import install
    from equipoise.backends.cuda import BACKEND

    install()
    return BACKEND
