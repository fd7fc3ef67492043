"""Rules about tests: each asserts something, and none sleeps for long."""

import ast
from pathlib import Path

from house_rules import LONGEST_SLEEP, parse, python_files

Function = ast.FunctionDef | ast.AsyncFunctionDef
TELLING: tuple[str, ...] = ("raises", "warns", "fail")
"""Functions of pytest that fail a test."""


def assertless_tests(root: Path) -> list[str]:
    """Tests that can only fail by accident: no assert, no raises, no helper that has one."""
    trees = {path: parse(path) for path in python_files(root, "tests")}
    functions = [f for tree in trees.values() for f in ast.walk(tree) if isinstance(f, Function)]
    telling = _telling_names(functions)
    return [
        f"{path.relative_to(root).as_posix()}:{node.lineno}: {node.name} asserts nothing"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and node.name.startswith("test_")
        and path.name.startswith("test_")
        and not _tells(node, telling)
    ]


def long_sleeps(root: Path) -> list[str]:
    """Sleeps of a constant above the limit, in tests."""
    return [
        f"{path.relative_to(root).as_posix()}:{node.lineno}: sleeps for {ast.unparse(node.args[0])}"
        for path in python_files(root, "tests")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and _called(node) == "sleep" and _too_long(node)
    ]


def _telling_names(functions: list[Function]) -> set[str]:
    """Names of functions that assert, or call one that does, to any depth."""
    telling: set[str] = set(TELLING)
    while True:
        found = {f.name for f in functions if not f.name.startswith("test_") and _tells(f, telling)}
        if found <= telling:
            return telling
        telling |= found


def _tells(function: Function, telling: set[str]) -> bool:
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and _called(node) in telling)
        or (isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node))
        for node in ast.walk(function)
    )


def _called(call: ast.Call) -> str:
    target = call.func
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else ""


def _too_long(call: ast.Call) -> bool:
    value = call.args[0] if call.args else None
    return (
        isinstance(value, ast.Constant)
        and isinstance(value.value, int | float)
        and value.value > LONGEST_SLEEP
    )
