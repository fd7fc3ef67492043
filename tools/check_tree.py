"""Checks the tree for what no linter knows, and prints each violation as `path:line: text`.

    python tools/check_tree.py [ROOT]

Every file is read once, and parsed once at most; nothing of the project is imported. ruff checks
style, docstrings and absolute imports; import-linter checks which package imports which; mkdocs
checks the navigation and the links between pages. This checks the rest:

* code: no pickle, no text that speaks of a machine, a package index or anything else foreign;
* tests: each asserts something, none sleeps for long, names are short and have a subject;
* documents: clauses, paths and links that they name exist;
* the package: links to the folders at the top level, one version, plain pins.
"""

import ast
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

LINKED = ("hal", "backends", "balancer", "pipeline", "integrations")
"""Folders at the top level that are parts of the package through a link in src/equipoise."""
FOLDERS = (*LINKED, "src", "tests", "examples", "benchmarks", "csrc", "tools", "docs")
CODE = frozenset({".py", ".pyi", ".cpp", ".h"})
TEXT = CODE | {".md", ".toml", ".ini", ".yml", ".yaml", ".sh"}
ROOT_FILES = ("*.md", "*.toml", "*.ini", "*.yml", "*.txt", "*.py", ".ci/run")


@dataclass(frozen=True, order=True)
class Violation:
    """A rule broken in one line of one file."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """The line that is printed."""
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Source:
    """The text of a file, and its syntax tree if one is asked for."""

    path: str
    text: str

    @property
    def name(self) -> str:
        """Name without the folder."""
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """End of the name, from the dot."""
        return PurePosixPath(self.path).suffix

    @property
    def is_code(self) -> bool:
        """Whether it is Python or C++."""
        return self.suffix in CODE

    @property
    def is_test_code(self) -> bool:
        """Whether it is Python under tests/, helpers included."""
        return self.suffix == ".py" and self.path.startswith("tests/")

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of a Python file."""
        return tuple(ast.walk(ast.parse(self.text, self.path)))

    def line_of(self, position: int) -> int:
        """Number of the line that holds a character."""
        return self.text.count("\n", 0, position) + 1

    def violation(self, line: int, text: str) -> Violation:
        """A violation in a line of this file."""
        return Violation(self.path, line, text)


@dataclass
class Tree:
    """What was read under a root."""

    root: Path
    sources: dict[str, Source]
    functions: list["Function"] = field(default_factory=list)
    """Functions of test code; collected while syntax trees are at hand."""

    def text(self, path: str) -> str:
        """Text of a file, empty if it is not there."""
        return self.sources[path].text if path in self.sources else ""


FileRule = Callable[[Source], Iterator[Violation]]
TreeRule = Callable[[Tree], Iterator[Violation]]


def read_tree(root: Path) -> Tree:
    """Reads code, documents and settings; what a link points at is read in its own place only."""
    paths = {path for pattern in ROOT_FILES for path in root.glob(pattern) if path.is_file()}
    for folder in FOLDERS:
        for parent, _, names in os.walk(root / folder):
            paths |= {Path(parent, name) for name in names if Path(name).suffix in TEXT}
    named = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
    return Tree(root, {name: Source(name, path.read_text("utf-8")) for name, path in named.items()})


def check(root: Path) -> list[Violation]:
    """Violations of every rule, sorted."""
    tree = read_tree(root)
    found: list[Violation] = []
    for source in tree.sources.values():
        for file_rule in FILE_RULES:
            found += file_rule(source)
        if source.is_test_code:
            tree.functions += functions(source)
        # All syntax trees at once would take most of a gigabyte.
        source.__dict__.pop("nodes", None)
    for tree_rule in TREE_RULES:
        found += tree_rule(tree)
    return sorted(set(found))


# --- code ---

PICKLERS = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"})
MAY_PICKLE = re.compile(r"\b(?:" + "|".join(PICKLERS) + r"|load|allow_pickle)\b")
MEASURED_PICKLERS = frozenset({"benchmarks/lib/handovers.py"})
"""Files that measure pickle: engines send it between ranks in every step."""

# Put together from parts, so that this file does not break its own rule.
FOREIGN = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:wo" + r"rk|tm" + r"p/w|op" + r"t|ro" + r"ot)\b",
            r"py" + r"pi\.",
            r"python" + r"hosted",
            r"download\.py" + r"torch",
        )
    ),
    re.IGNORECASE,
)
"""Paths of one machine, and hosts of package indexes."""
WORK_WORD = re.compile(r"\bses" + r"sion\b", re.IGNORECASE)
"""A word for how the project is worked on; in code it is POSIX's or pytest's."""


def pickle_use(source: Source) -> Iterator[Violation]:
    """Imports of pickle and its relatives, and loaders that unpickle."""
    # Few files have any of these words: the others need not be parsed.
    if source.suffix != ".py" or not MAY_PICKLE.search(source.text):
        return
    if source.path in MEASURED_PICKLERS:
        return
    for node in source.nodes:
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name.partition(".")[0] for alias in aliases]
            case ast.ImportFrom(module=str(module)):
                modules = [module.partition(".")[0]]
            case ast.Call() if _unpickles(node):
                yield source.violation(node.lineno, "uses pickle")
                continue
            case _:
                continue
        for module in PICKLERS.intersection(modules):
            yield source.violation(node.lineno, f"uses {module}")


def _unpickles(call: ast.Call) -> bool:
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "torch.load":
        return options.get("weights_only") != "True"
    return options.get("allow_pickle") == "True"


def foreign_words(source: Source) -> Iterator[Violation]:
    """Text that speaks of something other than the project."""
    for pattern in (FOREIGN, WORK_WORD) if source.suffix == ".md" else (FOREIGN,):
        for match in pattern.finditer(source.text):
            yield source.violation(source.line_of(match.start()), f"says {match[0]!r}")


# --- tests ---

LONGEST_SLEEP = 1.0
LONGEST_TEST_NAME = 80
NO_SUBJECT = re.compile(r"test_(what|who|where|whoever|nor|else|so|such|it|that|they|those|there)_")
FAILING = frozenset({"raises", "warns", "fail"})
"""Functions of pytest that fail a test."""


@dataclass(frozen=True)
class Function:
    """A function of test code, and what of its body could fail a test."""

    source: Source
    line: int
    name: str
    asserts: bool
    calls: frozenset[str]

    @property
    def is_test(self) -> bool:
        """Whether pytest collects it."""
        return self.name.startswith("test_") and self.source.name.startswith("test_")


def functions(source: Source) -> Iterator[Function]:
    """All functions of a file, methods and nested ones included."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = tuple(ast.walk(node))
            calls = frozenset(_called(inner) for inner in body if isinstance(inner, ast.Call))
            yield Function(source, node.lineno, node.name, any(map(_asserts, body)), calls)


def _asserts(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node)
    )


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def assertless_tests(tree: Tree) -> Iterator[Violation]:
    """Tests that can only fail by accident: no assert, no raises, no helper that has one."""
    helpers = [function for function in tree.functions if not function.name.startswith("test_")]
    failing = FAILING | {helper.name for helper in helpers if helper.asserts}
    while more := {h.name for h in helpers if h.calls & failing} - failing:
        failing |= more
    for function in tree.functions:
        if function.is_test and not function.asserts and not function.calls & failing:
            yield function.source.violation(function.line, f"{function.name} asserts nothing")


def test_names(tree: Tree) -> Iterator[Violation]:
    """Names of tests that are long, or whose subject is a pronoun."""
    for function in tree.functions:
        if not function.is_test:
            continue
        if len(function.name) > LONGEST_TEST_NAME:
            text = f"{function.name} has {len(function.name)} characters, over {LONGEST_TEST_NAME}"
            yield function.source.violation(function.line, text)
        if match := NO_SUBJECT.match(function.name):
            text = f"{function.name} begins with {match[1]!r}: name the object under test"
            yield function.source.violation(function.line, text)


def long_sleeps(source: Source) -> Iterator[Violation]:
    """Sleeps of tests over a constant number of seconds."""
    if not source.is_test_code or "sleep" not in source.text:
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _called(node) == "sleep" and node.args:
            match node.args[0]:
                case ast.Constant(value=int() | float() as seconds) if seconds > LONGEST_SLEEP:
                    yield source.violation(node.lineno, f"sleeps for {seconds} s")


# --- documents ---

CONTRACT = "docs/contract.md"
FAMILIES = "OVAKPESDGXLCBRT"
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\| (.+?) \|$", re.MULTILINE)
ROW_START = re.compile(r"^\| ([A-Z]\d+) \|", re.MULTILINE)
KIND = re.compile(r"required|reported|capabilit(y|ies)\b")
TESTED_BY = re.compile(r"`tests/|\bconformance \(|\bowed\b")
ID = rf"[{FAMILIES}][0-9]{{1,2}}"
LIST = rf"({ID}(?:(?:, | and | to ){ID})*)"
CITED = re.compile(rf"[Cc]lauses?:? {LIST}|\({LIST}\)")
RANGE = re.compile(r"([A-Z])(\d+) to \1(\d+)")
PATH = re.compile(r"`([a-z0-9_./]+)`")
MODULE = re.compile(r"`((?:hal|backends|balancer|pipeline|integrations|src|csrc)/[\w./]*)`")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def clauses(text: str) -> list[str]:
    """Identifiers of the rows of the contract's tables, in order."""
    return [match[1] for match in ROW.finditer(text)]


def citations(text: str) -> Iterator[tuple[int, str]]:
    """Position and identifier of `clause X1`, `(X1)` and such lists; ranges are spelt out."""
    for match in CITED.finditer(text):
        listed = match[1] or match[2]
        cited = set(re.findall(ID, listed))
        for family, first, last in RANGE.findall(listed):
            cited |= {f"{family}{number}" for number in range(int(first), int(last) + 1)}
        yield from ((match.start(), clause) for clause in cited)


def contract_rows(tree: Tree) -> Iterator[Violation]:
    """Clauses without their six columns, numbered with gaps, or of no known kind."""
    contract = tree.sources.get(CONTRACT, Source(CONTRACT, ""))
    rows = {match.start(): match for match in ROW.finditer(contract.text)}
    expected = dict.fromkeys(FAMILIES, 1)
    for start in ROW_START.finditer(contract.text):
        clause, line = start[1], contract.line_of(start.start())
        family, number = clause[0], int(clause[1:])
        if number != expected.get(family):
            yield contract.violation(line, f"{clause}: expected {family}{expected.get(family)}")
        expected[family] = number + 1
        row = rows.get(start.start())
        if row is None:
            yield contract.violation(line, f"{clause}: a clause has six columns")
            continue
        if not KIND.match(row[3]):
            yield contract.violation(line, f"{clause}: {row[3]!r} is no kind of clause")
        if not TESTED_BY.search(row[6]):
            yield contract.violation(line, f"{clause}: says neither what tests it nor 'owed'")
        for path in PATH.findall(row[4]) + PATH.findall(row[6]):
            if "/" in path and not (tree.root / path).exists():
                yield contract.violation(line, f"{clause}: {path} does not exist")
    for family in FAMILIES:
        if expected[family] == 1:
            yield contract.violation(1, f"no clause of family {family}")


def cited_clauses(tree: Tree) -> Iterator[Violation]:
    """Citations of clauses that the contract does not have, in code and documents."""
    known = set(clauses(tree.text(CONTRACT)))
    for source in tree.sources.values():
        if source.is_code or source.path.startswith("docs/"):
            for position, clause in citations(source.text):
                if clause not in known:
                    text = f"clause {clause} is not in {CONTRACT}"
                    yield source.violation(source.line_of(position), text)


def document_links(tree: Tree) -> Iterator[Violation]:
    """Relative links of documents that lead nowhere."""
    for source in tree.sources.values():
        if source.suffix != ".md":
            continue
        folder = (tree.root / source.path).parent
        for match in LINK.finditer(source.text):
            if "://" not in match[1] and not (folder / match[1]).exists():
                text = f"{match[1]} does not exist"
                yield source.violation(source.line_of(match.start()), text)


def design_paths(tree: Tree) -> Iterator[Violation]:
    """Modules and folders that a design page names and that are not there."""
    for source in tree.sources.values():
        if source.path.startswith("docs/design/"):
            for match in MODULE.finditer(source.text):
                if not (tree.root / match[1]).exists():
                    text = f"{match[1]} does not exist"
                    yield source.violation(source.line_of(match.start()), text)


# --- the package ---

PACKAGE = "src/equipoise"
PINS = "constraints.txt"
PIN = re.compile(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*")


def package_links(tree: Tree) -> Iterator[Violation]:
    """Parts of the package that are not links to the folders at the top level."""
    for part in LINKED:
        link = tree.root / PACKAGE / part
        if not link.is_symlink() or link.readlink() != Path("..", "..", part):
            yield Violation(f"{PACKAGE}/{part}", 1, f"is not a link to ../../{part}")
        elif not link.is_dir():
            yield Violation(f"{PACKAGE}/{part}", 1, "the link points nowhere")


def one_version(tree: Tree) -> Iterator[Violation]:
    """The package and the project's metadata give one version."""
    project = tomllib.loads(tree.text("pyproject.toml")).get("project", {}).get("version")
    match = re.search(r'^__version__ = "(.+)"$', tree.text(f"{PACKAGE}/__init__.py"), re.MULTILINE)
    if match is None or match[1] != project:
        text = f"__version__ is not {project}, the version of pyproject.toml"
        yield Violation(f"{PACKAGE}/__init__.py", 1, text)


def plain_pins(tree: Tree) -> Iterator[Violation]:
    """Pins with a local label, a range or a marker could not be resolved elsewhere."""
    lines = tree.text(PINS).splitlines()
    if not lines:
        yield Violation(PINS, 1, "has no pins")
    names = Counter(line.partition("==")[0].lower() for line in lines)
    for number, line in enumerate(lines, 1):
        if not PIN.fullmatch(line):
            yield Violation(PINS, number, f"{line!r} is not NAME==VERSION")
        elif names[line.partition("==")[0].lower()] > 1:
            yield Violation(PINS, number, f"{line!r} is pinned twice")


def empty_folders(tree: Tree) -> Iterator[Violation]:
    """Folders of which nothing was read: rules over no files are kept by any tree."""
    for folder in FOLDERS:
        if not any(path.startswith(f"{folder}/") for path in tree.sources):
            yield Violation(folder, 1, "no file was read here")


FILE_RULES: tuple[FileRule, ...] = (pickle_use, foreign_words, long_sleeps)
TREE_RULES: tuple[TreeRule, ...] = (
    assertless_tests,
    test_names,
    contract_rows,
    cited_clauses,
    document_links,
    design_paths,
    package_links,
    one_version,
    plain_pins,
    empty_folders,
)


def main(arguments: list[str]) -> int:
    """Prints what `check` finds; the exit status is 1 if it finds anything."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = check(root)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
