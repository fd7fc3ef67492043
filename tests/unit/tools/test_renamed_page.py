"""New names of docs/design/renamed.md exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from helpers.paths import ROOT

PAGE = (ROOT / "docs" / "design" / "renamed.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "equipoise"


def module_file(name: str) -> Path | None:
    """The file of a module of the package, None if there is none."""
    path = PACKAGE.joinpath(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi"))
    return next((candidate for candidate in candidates if candidate.exists()), None)


@cache
def names_of(path: Path) -> frozenset[str]:
    """Everything that is defined or imported anywhere in a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
            ):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(name=name):
                names.add(name)
    return frozenset(names)


def test_modules_of_renamed_page_exist() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) > 300
    assert [new for _, new in rows if module_file(new) is None] == []
    assert [old for old, new in rows if old == new] == []


@pytest.mark.slow
def test_names_of_renamed_page_are_in_their_modules() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| `(\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) > 1000
    missing = []
    for module, _, new in rows:
        path = module_file(module)
        if path is None or new not in names_of(path):
            missing.append(f"{module}.{new}")
    assert missing == []
