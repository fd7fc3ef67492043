"""The stub and the module agree, name by name and parameter by parameter."""

import ast
import re
from pathlib import Path

import equipoise
from equipoise import _native

STUB = Path(equipoise.__file__).parent / "_native.pyi"


Overload = tuple[str, str, tuple[object, ...] | None]
Signature = tuple[list[str], list[str]]


def signature(function: ast.FunctionDef) -> Signature:
    arguments = function.args
    return [a.arg for a in arguments.args], [ast.unparse(d) for d in arguments.defaults]


def defined(body: list[ast.stmt], owner: str = "") -> dict[str, ast.FunctionDef]:
    """Functions by name, methods by class and name; how an object is made counts as the class."""
    found: dict[str, ast.FunctionDef] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= defined(node.body, node.name + ".")
        elif isinstance(node, ast.FunctionDef):
            found[owner + node.name] = node
    return found


def stubbed() -> dict[str, Signature]:
    body = ast.parse(STUB.read_text()).body
    return {name: signature(node) for name, node in defined(body).items()}


def compiled() -> dict[str, Signature]:
    return {name: parse(name, *overloads) for name, overloads in offered(_native).items()}


def offered(owner: object, prefix: str = "") -> dict[str, tuple[Overload]]:
    """What `owner` offers, as the module says it."""
    found: dict[str, tuple[Overload]] = {}
    for name, value in vars(owner).items():
        if isinstance(value, type):
            found |= offered(value, name + ".")
        elif isinstance(value, property):
            continue
        elif not name.startswith("_") or (name == "__init__" and prefix):
            found |= signed(prefix + name, value)
    return found


def signed(name: str, value: object) -> dict[str, tuple[Overload]]:
    """Nothing for what the interpreter brings along: no one can make such an object."""
    told = getattr(value, "__nb_signature__", None)
    assert told is not None or name.endswith(".__init__"), name
    return {} if told is None else {name: told}


def parse(name: str, only: Overload) -> Signature:
    text, _, defaults = only
    parameters = re.search(r"\((.*?)\) ->", text)
    assert parameters is not None, name
    # A default stands in the text as a backslash and its place in the tuple.
    filled = re.sub(r"\\(\d+)", lambda m: repr((defaults or ())[int(m[1])]), parameters[1])
    (parsed,) = ast.parse(f"def function({filled}): ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return signature(parsed)


def test_stub_functions_match_native_module() -> None:
    assert stubbed() == compiled()


def test_stub_functions_have_docstrings() -> None:
    body = ast.parse(STUB.read_text()).body
    assert defined(body)
    assert all(ast.get_docstring(node) for node in defined(body).values())


def test_stub_attributes_match_native_classes() -> None:
    told = {
        f"{node.name}.{line.target.id}"
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    there = {
        f"{owner.__name__}.{name}"
        for owner in vars(_native).values()
        if isinstance(owner, type)
        for name, value in vars(owner).items()
        if isinstance(value, property)
    }
    assert told
    assert told == there
