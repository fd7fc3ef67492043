"""Where torch and torch_npu are installed, without importing them: that takes seconds."""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from npusim.errors import Refused


@dataclass(frozen=True)
class Wheel:
    """An installed package: its folder and its version."""

    folder: Path
    version: str


def find_torch(name: str = "torch") -> Wheel:
    """The installed torch. Raises `Refused` when there is none, or one built for CUDA or ROCm."""
    wheel = _find(name, "torch is not installed")
    constants = _assigned(wheel.folder / "version.py")
    for kind in ("cuda", "hip"):
        if constants.get(kind) is not None:
            raise Refused(
                f"torch {wheel.version} is built for {kind.upper()}: torch_npu needs a CPU build"
            )
    return wheel


def find_torch_npu(name: str = "torch_npu") -> Wheel:
    """The installed torch_npu. Raises `Refused` when there is none."""
    return _find(name, "torch_npu is not installed: pip install torch_npu==2.13.0")


def _find(name: str, otherwise: str) -> Wheel:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise Refused(otherwise)
    folder = Path(spec.origin).parent
    return Wheel(folder, str(_assigned(folder / "version.py").get("__version__", "unknown")))


def _assigned(path: Path) -> dict[str, object]:
    """Constants that a module assigns at its top."""
    constants: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                constants[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                constants[name] = value
    return constants
