"""Examples import from few places: `equipoise` has what they need."""

import ast
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
MAX_PLACES = 3
MAX_LINES = 150
SERVING = ("nano.py", "own_loop.py")


def modules(path: Path) -> set[str]:
    """Top-level modules that a file imports, without the standard library."""
    imported_modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import(names=names):
                imported_modules |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)):
                imported_modules.add(module)
    return {
        name for name in imported_modules if name.partition(".")[0] not in sys.stdlib_module_names
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_example_imports_from_three_places_at_most(path: Path) -> None:
    assert len({name.partition(".")[0] for name in modules(path)}) <= MAX_PLACES


@pytest.mark.parametrize("name", SERVING)
def test_serving_example_imports_package_by_its_name_alone(name: str) -> None:
    assert modules(EXAMPLES / name) == {"equipoise", "torch"}
    assert len((EXAMPLES / name).read_text("utf-8").splitlines()) <= MAX_LINES
