"""Where the wheels are found, and which torch is refused."""

from pathlib import Path

import pytest
from npusim import wheels
from npusim.errors import Refused


def install(folder: Path, name: str, version: str, text: str = "") -> None:
    """A package that says its version, and would fail if it were imported."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')\n")
    (package / "version.py").write_text(f"__version__ = {version!r}\n{text}")


def test_find_torch_accepts_cpu_build_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "torch_of_cpu", "1.0+cpu", "cuda: str | None = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = wheels.find_torch("torch_of_cpu")
    assert package == wheels.Wheel(tmp_path / "torch_of_cpu", "1.0+cpu")


@pytest.mark.parametrize(
    ("text", "kind"), [("cuda: str | None = '13.0'\n", "CUDA"), ("hip = '7.1'\n", "HIP")]
)
def test_find_torch_refuses_build_for_another_accelerator(
    text: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, f"torch_of_{kind}", "1.0", text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Refused, match=f"^torch 1.0 is built for {kind}: .* CPU build$"):
        wheels.find_torch(f"torch_of_{kind}")


def test_find_torch_npu_names_missing_package_and_remedy() -> None:
    with pytest.raises(Refused, match=r"^torch_npu is not installed: pip install torch_npu==2"):
        wheels.find_torch_npu("no_such_package")
