"""The import contracts of pyproject.toml are broken by the imports that they forbid."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXPERTS = Path("balancer", "experts")
LEVELS = [
    name.strip()
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    if contract["name"] == "Levels of the expert balancer"
    for layer in contract["layers"]
    for name in layer.split("|")
]
API = ("connection", "opening", "channel", "backend_check")
PACKAGES = (
    *("hal", "backends", "balancer", "pipeline", "integrations", "compat", "demo", "report"),
    *API,
)
FORBIDDEN = (
    ("balancer", "equipoise.backends"),
    ("balancer.experts.planning", "equipoise.balancer.experts.open"),
    ("balancer.experts.routing", "equipoise.balancer.experts.weights"),
    ("hal", "equipoise.balancer"),
    ("balancer", "equipoise.pipeline"),
    ("report", "equipoise.serve"),
    ("pipeline", "vllm"),
    ("hal", "torch_npu"),
    ("hal", "cupy"),
    ("balancer", "deep_ep"),
    ("hal", "pynvml"),
    ("serve", "ray"),
    ("serve", "torch"),
    ("serve", "numpy"),
    ("serve", "equipoise.balancer.experts"),
    ("serve", "equipoise.pipeline"),
    ("compat", "sglang"),
    ("compat", "tensorrt_llm"),
    ("connection", "equipoise.backends"),
    ("connection", "equipoise.opening"),
    ("opening", "equipoise.demo"),
    ("channel", "mpi4py"),
    ("backend_check", "equipoise.cli"),
)
ALLOWED = (
    ("balancer", "equipoise.hal"),
    ("balancer.experts.open", "equipoise.balancer.experts.planning"),
    ("backends", "torch_npu"),
    ("integrations", "vllm"),
    ("cli", "equipoise.serve"),
    ("opening", "equipoise.connection"),
    ("demo", "equipoise.connection"),
)


def test_forbidden_imports_break_their_contracts(tmp_path: Path) -> None:
    """All are planted into one package of empty modules, which import-linter reads once."""
    package = tmp_path / "equipoise"
    inner = (EXPERTS, *(EXPERTS / level for level in LEVELS))
    for name in ("", "__main__", "cli", "serve", *PACKAGES, *inner):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    # The package names its public parts for type checkers, whoever imports the package.
    (package / "__init__.py").write_text("import equipoise.cli\n", encoding="utf-8")
    (package / "hal" / "__init__.py").write_text("import equipoise\n", encoding="utf-8")
    for number, (importer, imported) in enumerate(FORBIDDEN + ALLOWED):
        module = package.joinpath(*importer.split(".")) / f"module_{number}.py"
        module.write_text(f"import {imported}\n", encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    linter = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert linter.returncode == 1, linter.stderr
    assert "Contracts: 0 kept, 5 broken." in linter.stdout
    violations = {
        (importer, imported)
        for number, (importer, imported) in enumerate(FORBIDDEN + ALLOWED)
        if f"equipoise.{importer}.module_{number} -> {imported} (l.1)" in linter.stdout
    }
    assert violations == set(FORBIDDEN), linter.stdout
