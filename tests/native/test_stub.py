"""The stub and the module agree, name by name and parameter by parameter."""

import ast
import re
from pathlib import Path

import equipoise
from equipoise import _native

STUB = Path(equipoise.__file__).parent / "_native.pyi"


def signature(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    arguments = function.args
    return [a.arg for a in arguments.args], [ast.unparse(d) for d in arguments.defaults]


def stubbed() -> dict[str, tuple[list[str], list[str]]]:
    body = ast.parse(STUB.read_text()).body
    return {node.name: signature(node) for node in body if isinstance(node, ast.FunctionDef)}


def compiled() -> dict[str, tuple[list[str], list[str]]]:
    functions = {n: f.__nb_signature__ for n, f in vars(_native).items() if not n.startswith("_")}
    return {name: parse(name, *overloads) for name, overloads in functions.items()}


def parse(
    name: str, only: tuple[str, str, tuple[object, ...] | None]
) -> tuple[list[str], list[str]]:
    text, _, defaults = only
    parameters = re.search(r"\((.*?)\) ->", text)
    assert parameters is not None, name
    # A default stands in the text as a backslash and its place in the tuple.
    filled = re.sub(r"\\(\d+)", lambda m: repr((defaults or ())[int(m[1])]), parameters[1])
    (parsed,) = ast.parse(f"def {name}({filled}): ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return signature(parsed)


def test_the_stub_names_every_function_with_its_parameters_and_no_other() -> None:
    assert stubbed() == compiled()


def test_every_function_of_the_stub_says_what_it_does() -> None:
    body = ast.parse(STUB.read_text()).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    assert functions
    assert all(ast.get_docstring(node) for node in functions)
