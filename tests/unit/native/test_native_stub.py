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


def functions_in(body: list[ast.stmt], owner: str = "") -> dict[str, ast.FunctionDef]:
    """Functions by name, methods by class and name; how an object is made counts as the class."""
    functions: dict[str, ast.FunctionDef] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            functions |= functions_in(node.body, node.name + ".")
        elif isinstance(node, ast.FunctionDef):
            functions[owner + node.name] = node
    return functions


def stub_signatures() -> dict[str, Signature]:
    body = ast.parse(STUB.read_text()).body
    return {name: signature(node) for name, node in functions_in(body).items()}


def native_signatures() -> dict[str, Signature]:
    return {name: parse(name, *overloads) for name, overloads in overloads_of(_native).items()}


def overloads_of(owner: object, prefix: str = "") -> dict[str, tuple[Overload]]:
    """What `owner` offers, as the module says it."""
    overloads: dict[str, tuple[Overload]] = {}
    for name, value in vars(owner).items():
        if isinstance(value, type):
            overloads |= overloads_of(value, name + ".")
        elif isinstance(value, property):
            continue
        elif not name.startswith("_") or (name == "__init__" and prefix):
            overloads |= overload_of(prefix + name, value)
    return overloads


def overload_of(name: str, value: object) -> dict[str, tuple[Overload]]:
    """Nothing for what the interpreter brings along: no one can make such an object."""
    overload = getattr(value, "__nb_signature__", None)
    assert overload is not None or name.endswith(".__init__"), name
    return {} if overload is None else {name: overload}


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
    assert stub_signatures() == native_signatures()


def test_stub_functions_have_docstrings() -> None:
    body = ast.parse(STUB.read_text()).body
    assert functions_in(body)
    assert all(ast.get_docstring(node) for node in functions_in(body).values())


def test_stub_attributes_match_native_classes() -> None:
    stub_attributes = {
        f"{node.name}.{line.target.id}"
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    native_attributes = {
        f"{owner.__name__}.{name}"
        for owner in vars(_native).values()
        if isinstance(owner, type)
        for name, value in vars(owner).items()
        if isinstance(value, property)
    }
    assert stub_attributes
    assert stub_attributes == native_attributes
