"""`python -m vllm_cpu.fetch`: vLLM 0.33, unpacked in front of the vLLM that is installed.

There is no CPU build of 0.33. Its Python runs over the extensions of the CPU build of 0.32: what it
calls of them is unchanged, but for kernels of models that no test has. The Python of a CPU build
differs from that of the wheel for GPUs in two files (see README.md), so this is the code that GPUs
run.
"""

import re
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

from vllm_cpu.unpack import mark_unpacked, name_distribution, unpack_wheels

VERSION = "0.33.0"
FOLDER = Path(sys.prefix, f"vllm-{VERSION}")
"""To be put in front on PYTHONPATH."""
NEWEST = Path(sys.prefix, "vllm-newest")
NATIVE = (".so", "vllm-rs")
"""What the wheel has for GPUs, by the ends of names."""
HEADERS = ("vllm/third_party/",)
ENTRY_POINTS = """\
[vllm.platform_plugins]
vllm_cpu = vllm_cpu.plugin:platform

[vllm.general_plugins]
vllm_cpu = vllm_cpu.plugin:prepare
"""
"""Those of the installed distribution, which this one hides."""


def is_needed(name: str) -> bool:
    """Whether a file of the wheel is unpacked."""
    if name.startswith(HEADERS):
        return name.endswith(".py")
    return name.startswith("vllm/") and not name.endswith(NATIVE)


def fetch(folder: Path, wheel: str) -> None:
    """Unpack, unless it was; raises where pip fails."""
    if not unpack_wheels(folder, (wheel,), is_needed):
        return
    for extension in Path(str(distribution("vllm-cpu").locate_file("vllm"))).glob("*.so"):
        (folder / "vllm" / extension.name).symlink_to(extension)
    name_distribution(folder, version_of(folder), ENTRY_POINTS)
    mark_unpacked(folder, (wheel,))


def fetch_newest() -> str:
    """Unpack the newest release to `NEWEST`; returns its version."""
    shutil.rmtree(NEWEST, ignore_errors=True)
    fetch(NEWEST, "vllm")
    return version_of(NEWEST)


def version_of(folder: Path) -> str:
    """The version that an unpacked vLLM says, without its local part."""
    text = (folder / "vllm" / "_version.py").read_text("utf-8")
    found = re.search(r"""version = ["']([^"'+]+)""", text)
    if found is None:
        raise RuntimeError(f"{folder}: vllm/_version.py says no version")
    return found[1]


if __name__ == "__main__":
    fetch(FOLDER, f"vllm=={VERSION}")
