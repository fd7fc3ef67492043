"""The rules of the house as functions: each takes a root folder and returns its violations.

A violation is one line: path, line number, what is wrong. `test_house.py` holds them to the tree,
and each of them to a planted violation.

    python tests/house_rules.py          the five largest files and functions

tells what grows before it is a violation.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS = ("hal", "backends", "balancer", "pipeline", "integrations")
FOLDERS = (*PARTS, "src", "tests", "examples", "benchmarks", "csrc")
ROOT_FILES = ("*.md", "*.toml", "*.ini", "*.yml", "*.txt", "setup.py", ".ci/run", "docs/**/*.md")
CODE = (".py", ".pyi", ".cpp", ".h")
LONGEST_FUNCTION = 40
LONGEST_FILE = 400
LONGEST_SLEEP = 1.0
PICKLERS = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"})
MEASURED_PICKLERS = ("benchmarks/lib/handovers.py",)
"""Where pickle is what is measured: others send it between ranks in every step."""
# Here published signatures are kept, so their owners have to be named.
VENDORS = frozenset(
    {"nvidia", "cuda", "cudnn", "nccl", "cupti", "triton", "rocm", "hip", "amdgpu", "xpu", "oneccl"}
    | {"ascend", "npu", "hccl", "cann", "mindie", "vllm", "sglang", "tensorrt", "deepep"}
)
PUBLISHED = (
    "balancer/compat/",
    "balancer/experts/routing_rule.py",
    "balancer/formats/",
    "balancer/requests/",
    "src/equipoise/compat/",
)
"""Where other systems' formats and signatures are spoken, and so their names; and where a routing
mode is named after the system whose rule it keeps."""
# Put together from parts, so that this file does not violate its own rule.
STRANGE_WORDS = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:wo" + r"rk|tm" + r"p/w|op" + r"t|ro" + r"ot)\b",
            r"py" + r"pi\.",
            r"python" + r"hosted",
            r"download\.py" + r"torch",
            r"\bses" + r"sion\b(?!\")",
        )
    ),
    re.IGNORECASE,
)


@dataclass(frozen=True, order=True)
class Sized:
    """Something with a length in lines."""

    lines: int
    name: str


def code_files(root: Path, *folders: str) -> list[Path]:
    """Code under `folders` (all of them by default); links are not followed twice."""
    found = []
    for folder in folders or FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            inside_link = any(parent.is_symlink() for parent in path.parents if parent != root)
            if path.suffix in CODE and path.is_file() and not inside_link:
                found.append(path)
    return found


def python_files(root: Path, *folders: str) -> list[Path]:
    """The Python ones."""
    return [path for path in code_files(root, *folders) if path.suffix == ".py"]


def parse(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def file_sizes(root: Path) -> list[Sized]:
    """Every file of code, longest first."""
    sizes = [
        Sized(len(path.read_text(encoding="utf-8").splitlines()), _name(root, path))
        for path in code_files(root)
    ]
    return sorted(sizes, reverse=True)


def function_sizes(root: Path) -> list[Sized]:
    """Every function of Python and of C++, longest first."""
    sizes = []
    for path in code_files(root):
        measure = _python_functions if path.suffix in (".py", ".pyi") else _cpp_functions
        sizes += [
            Sized(lines, f"{_name(root, path)}:{line} {name}")
            for line, name, lines in measure(path)
        ]
    return sorted(sizes, reverse=True)


def largest(root: Path, count: int = 5) -> list[str]:
    """A line of files, and one of functions."""
    told = []
    for what, sizes in (("files", file_sizes(root)), ("functions", function_sizes(root))):
        names = ", ".join(f"{size.name} {size.lines}" for size in sizes[:count])
        told.append(f"largest {what}, of {len(sizes)}: {names}")
    return told


def long_files(root: Path) -> list[str]:
    """Files over the limit."""
    return [f"{s.name}: {s.lines} lines" for s in file_sizes(root) if s.lines > LONGEST_FILE]


def long_functions(root: Path) -> list[str]:
    """Functions over the limit."""
    sizes = function_sizes(root)
    return [f"{s.name}: {s.lines} lines" for s in sizes if s.lines > LONGEST_FUNCTION]


def relative_imports(root: Path) -> list[str]:
    """Imports that begin with a dot, or that name a folder instead of the package."""
    found = []
    for path in python_files(root):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and (node.level or _top(node.module) in PARTS):
                found.append(_at(root, path, node.lineno, "import from equipoise, absolutely"))
            if isinstance(node, ast.Import) and any(_top(a.name) in PARTS for a in node.names):
                found.append(_at(root, path, node.lineno, "import from equipoise, absolutely"))
    return found


def missing_docstrings(root: Path) -> list[str]:
    """Public modules, classes and functions that say nothing."""
    return [
        _at(root, path, line, f"{name} has no docstring")
        for path in python_files(root, *PARTS, "src", "examples", "benchmarks")
        for line, name in _undocumented(parse(path), path.stem)
    ]


def vendor_names(root: Path) -> list[str]:
    """Vendors and engines in identifiers and strings of the neutral folders.

    Comments and docstrings may name them: there they cite where something was learnt.
    """
    found = []
    for path in python_files(root, "hal", "balancer", "pipeline", "src"):
        if _name(root, path).startswith(PUBLISHED):
            continue
        for line, text in _spoken(path):
            words = set(re.findall(r"[a-z]+", re.sub(r"([A-Z][a-z])", r" \1", text).lower()))
            found += [_at(root, path, line, f"names {word}") for word in sorted(words & VENDORS)]
    return found


def picklers(root: Path) -> list[str]:
    """Imports of pickle and its kin, and loaders that unpickle."""
    return [
        _at(root, path, line, f"uses {name}")
        for path in python_files(root)
        if _name(root, path) not in MEASURED_PICKLERS
        for line, name in _pickled(parse(path))
    ]


def strange_words(root: Path) -> list[str]:
    """Texts that speak of something other than the project: its workplace, a registry's host."""
    paths = code_files(root) + [path for pattern in ROOT_FILES for path in root.glob(pattern)]
    return [
        _at(root, path, number, f"says {match[0]!r}")
        for path in sorted(set(paths))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in STRANGE_WORDS.finditer(line)
    ]


def wrong_links(root: Path) -> list[str]:
    """Parts of the package that are not links to the folders at the top."""
    wrong = []
    for part in PARTS:
        link = root / "src" / "equipoise" / part
        if not link.is_symlink() or link.readlink() != Path("..", "..", part):
            wrong.append(f"src/equipoise/{part}: not a link to ../../{part}")
        elif not link.is_dir():
            wrong.append(f"src/equipoise/{part}: the link points nowhere")
    return wrong


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _at(root: Path, path: Path, line: int, what: str) -> str:
    return f"{_name(root, path)}:{line}: {what}"


def _python_functions(path: Path) -> Iterator[tuple[int, str, int]]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def _cpp_functions(path: Path) -> Iterator[tuple[int, str, int]]:
    """From an unindented line with a parenthesis to the next brace that stands alone."""
    begun: tuple[int, str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.rstrip() == "}" and begun is not None:
            yield begun[0], begun[1], number - begun[0] + 1
            begun = None
        elif line.endswith(";") and line[:1].strip():
            begun = None  # a declaration
        elif re.match(r"[A-Za-z].*\(", line) and begun is None:
            begun = number, line.partition("(")[0].split()[-1]


def _undocumented(tree: ast.Module, stem: str) -> Iterator[tuple[int, str]]:
    if ast.get_docstring(tree) is None and tree.body:
        yield 1, f"module {stem}"
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            pending += node.body


def _spoken(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers and strings of a file, without comments and docstrings."""
    docstrings = {
        node.value.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        line = token.start[0]
        said = token.type == tokenize.STRING and line not in docstrings
        if said or token.type == tokenize.NAME:
            yield line, token.string


def _pickled(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [_top(alias.name) for alias in node.names]
            case ast.ImportFrom():
                names = [_top(node.module)]
            case ast.Call() if _unpickles(node):
                yield node.lineno, "pickle"
        if isinstance(node, ast.stmt):
            yield from ((node.lineno, name) for name in names if name in PICKLERS)


def _unpickles(call: ast.Call) -> bool:
    target = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if target == "torch.load":
        return options.get("weights_only") != "True"
    return options.get("allow_pickle") == "True"


if __name__ == "__main__":
    print(*largest(Path(__file__).resolve().parent.parent), sep="\n")
