"""Checks the tree for what no linter knows, and prints each violation as `path:line: text`.

    python tools/check_tree.py [ROOT]

Every file is read once, and parsed once at most; nothing of the project is imported. ruff checks
style, docstrings and absolute imports; import-linter checks which package imports which; mkdocs
checks the navigation and the links between pages. This checks the rest:

* code: no pickle, no text that speaks of a machine, a package index or anything else foreign;
* tests: each asserts something, none sleeps for long, names are short and have a subject;
* words: none that the appendix of the glossary lists as gone;
* documents: clauses, paths, environments of tox and links that they name exist;
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
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

LINKED = ("hal", "backends", "balancer", "pipeline", "integrations")
"""Folders at the top level that are parts of the package through a link in src/equipoise."""
FOLDERS = (
    *(*LINKED, "src", "tests", "examples", "benchmarks", "csrc", "tools", "docs", "conformance"),
)
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
    modules: dict[str, "Module"] = field(default_factory=dict)
    """Test code by dotted name; collected while syntax trees are at hand."""

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
    by_name = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
    return Tree(
        root, {name: Source(name, path.read_text("utf-8")) for name, path in by_name.items()}
    )


def check(root: Path) -> list[Violation]:
    """Violations of every rule, sorted."""
    tree = read_tree(root)
    violations: list[Violation] = []
    for source in tree.sources.values():
        for file_rule in FILE_RULES:
            violations += file_rule(source)
        if source.is_test_code:
            module = read_module(source)
            tree.modules |= dict.fromkeys(module_names(source.path), module)
        # All syntax trees at once would take most of a gigabyte.
        source.__dict__.pop("nodes", None)
    for tree_rule in TREE_RULES:
        violations += tree_rule(tree)
    return sorted(set(violations))


# --- code ---

PICKLERS = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
)
MAY_PICKLE = re.compile(r"\b(?:" + "|".join(PICKLERS) + r"|load|\w+_pickle)\b")
IMPORTERS = frozenset({"__import__", "import_module"})
MEASURED_PICKLERS = frozenset({"benchmarks/lib/handovers.py"})
"""Files that measure pickle: engines send it between ranks in every step."""

# Put together from parts, so that this file does not break its own rule.
FOREIGN = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:wo" + r"rk|tm" + r"p/w|op" + r"t|ro" + r"ot)\b",
            r"(?<![\w.])/(?:ho" + r"me|Us" + r"ers|mn" + r"t|me" + r"dia|Volu" + r"mes)/\w+",
            r"\b[A-Z]:\\+Us" + r"ers\b",
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
    torch = {"torch"}
    for node in source.nodes:
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name.partition(".")[0] for alias in aliases]
                torch |= {alias.asname or "" for alias in aliases if alias.name == "torch"}
            case ast.ImportFrom(module="torch", names=names) if "load" in [n.name for n in names]:
                yield source.violation(node.lineno, "uses pickle: call torch.load by that name")
                continue
            case ast.ImportFrom(module=str(module)):
                modules = [module.partition(".")[0]]
            case ast.Call(args=[ast.Constant(value=str(module)), *_]) if (
                _called_name(node) in IMPORTERS
            ):
                modules = [module.partition(".")[0]]
            case ast.Call() if _unpickles(node, torch):
                yield source.violation(node.lineno, "uses pickle")
                continue
            case _:
                continue
        for module in PICKLERS.intersection(modules):
            yield source.violation(node.lineno, f"uses {module}")


def _unpickles(call: ast.Call, torch: set[str]) -> bool:
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr="load") if name in torch:
            return options.get("weights_only") != "True"
        case ast.Attribute(attr="read_pickle" | "to_pickle"):
            return True
    return options.get("allow_pickle", "False") != "False"


def foreign_words(source: Source) -> Iterator[Violation]:
    """Text that speaks of something other than the project."""
    for pattern in (FOREIGN, WORK_WORD) if source.suffix == ".md" else (FOREIGN,):
        for match in pattern.finditer(source.text):
            yield source.violation(source.line_of(match.start()), f"says {match[0]!r}")


# --- tests ---

MAX_SLEEP = 1.0
MAX_TEST_NAME = 80
PRONOUNS = (
    "what|who|where|whoever|nor|else|so|such|it|its|that|they|those|these|this|there"
    "|everything|everybody|everyone|anything|nothing|nobody"
    "|one(?=_(?:is|has|does|can|may|must|waits|gets|gives|that|which|who)(?:_|$))"
)
VERBS = "works?|runs?|passes|fails|succeeds|behaves|ok"
NO_SUBJECT = re.compile(
    rf"test_((?:{PRONOUNS})(?=_|$)|(?:{VERBS})(?:_(?:fine|well|correctly|as_expected))?$)"
)
"""`one` may be a number: `test_one_worker_is_balanced`. A verb alone tells no object."""
ASSERTING = frozenset(
    {
        *("pytest.raises", "pytest.warns", "pytest.fail", "pytest.deprecated_call"),
        "hypothesis.stateful.run_state_machine_as_test",
        "equipoise.hal.conformance.context.require",
    }
)
"""Functions of others that fail a test; further ones are called `assert_*`."""
CONSTRUCTION = ("__init__", "__post_init__", "__enter__", "__exit__", "__aexit__", "__call__")
"""Methods that run where only the class is named."""


@dataclass(frozen=True, eq=False)
class Function:
    """A function, method or alias of test code, and what of its body could fail a test."""

    line: int
    name: str
    owner: str
    """Class of a method."""
    asserts: bool
    uses: frozenset[str]
    """Dotted names that it reads, those of its parameters included: these may be fixtures."""
    returned: str = ""
    """Its annotation."""


@dataclass(frozen=True, eq=False)
class Module:
    """NameResolver of a file of test code."""

    source: Source
    functions: dict[tuple[str, str], Function]
    """By class, which is empty outside of one, and name."""
    imports: dict[str, str]
    """What a name stands for, with the module that it is from."""
    bases: dict[str, tuple[str, ...]]
    """Base classes of each class."""
    constants: dict[str, float]
    sleeps: tuple[tuple[int, str], ...]
    """Lines of sleeps, and what they sleep for."""

    @property
    def tests(self) -> list[Function]:
        """What pytest collects."""
        if not self.source.name.startswith("test_"):
            return []
        return [item for item in self.functions.values() if item.name.startswith("test_")]


def module_names(path: str) -> Iterator[str]:
    """Names by which a file of test code is imported; tests/simulators/ is on the path too."""
    name = path.removeprefix("tests/").removesuffix(".py").removesuffix("/__init__")
    yield name.replace("/", ".")
    if name.startswith("simulators/"):
        yield name.removeprefix("simulators/").replace("/", ".")


def read_module(source: Source) -> Module:
    """Collects the names of a file."""
    functions = {(item.owner, item.name): item for item in _functions(source.nodes[0])}
    imports: dict[str, str] = {}
    bases: dict[str, tuple[str, ...]] = {}
    sleeps: list[tuple[int, str]] = []
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                for name in names:
                    root = name.name.partition(".")[0]
                    imports[name.asname or root] = name.name if name.asname else root
            case ast.ImportFrom(module=str(module), names=names):
                imports |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
            case ast.ClassDef(name=owner):
                bases[owner] = tuple(map(_dotted, node.bases))
            case ast.Call(args=[slept, *_]) if _called_name(node) == "sleep":
                sleeps.append((node.lineno, ast.unparse(slept)))
    return Module(source, functions, imports, bases, _constants(source.nodes[0]), tuple(sleeps))


def _functions(parent: ast.AST, owner: str = "") -> Iterator[Function]:
    """Functions and aliases of a module or class; nested ones belong to the function around."""
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                body = tuple(ast.walk(node))
                uses = {_dotted(inner) for inner in body}
                returned = _dotted(node.returns) if node.returns else ""
                yield Function(
                    node.lineno, name, owner, any(map(_asserts, body)), frozenset(uses), returned
                )
            case ast.ClassDef(name=name):
                yield from _functions(node, name)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.AST() as value)
            ):
                uses = {_dotted(inner) for inner in ast.walk(value)}
                yield Function(node.lineno, name, owner, asserts=False, uses=frozenset(uses))
            case ast.If() | ast.Try() | ast.With():
                yield from _functions(node, owner)


def _constants(module: ast.AST) -> dict[str, float]:
    constants = {}
    for node in ast.iter_child_nodes(module):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as value)
            ):
                if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                    constants[name] = float(value.value)
    return constants


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute; `.c` if it is one of an expression."""
    match node:
        case ast.Name(id=name) | ast.arg(arg=name):
            return name
        case ast.Attribute(value=ast.Constant() | ast.Dict() | ast.List() | ast.JoinedStr()):
            return ""
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
        case ast.Subscript(value=value):
            return _dotted(value)
    return ""


def _asserts(node: ast.AST) -> bool:
    match node:
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Assert(test=test):
            # One over literals alone cannot fail, or always does.
            return any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(test))
        case ast.Raise(exc=ast.AST() as error):
            return "AssertionError" in ast.unparse(error)
    return False


def _called_name(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


class NameResolver:
    """Finds what the names of test code stand for, through its imports."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self._modules = modules
        self.target = lru_cache(None)(self._target)
        self.classes = lru_cache(None)(self._classes)

    def _target(self, module: Module, name: str) -> tuple[Module | None, str]:
        """Module of test code that defines a name, and the rest; no module if it is another's."""
        root, _, remainder = name.partition(".")
        if root not in module.imports:
            return module, name
        full_name = module.imports[root] + (f".{remainder}" if remainder else "")
        parts = full_name.split(".")
        for length in range(len(parts), 0, -1):
            if target_module := self._modules.get(".".join(parts[:length])):
                inner = ".".join(parts[length:])
                return (
                    (target_module, "")
                    if target_module is module or not inner
                    else self.target(target_module, inner)
                )
        return None, full_name

    def _classes(self, module: Module) -> frozenset[tuple[Module, str]]:
        """Classes that a file defines or imports, or that its functions and fixtures return."""
        names = {*module.bases, *module.imports}
        places = [(module, name) for name in names]
        for home in (module, *self._conftests(module)):
            functions = [item for (owner, _), item in home.functions.items() if not owner]
            places += [(home, item.returned) for item in functions if item.returned]
        for name in module.imports:
            source, inner = self.target(module, name)
            if source and (function := source.functions.get(("", inner))) and function.returned:
                places.append((source, function.returned))
        targets = (self.target(place, name) for place, name in places)
        return frozenset((home, name) for home, name in targets if home and name in home.bases)

    def _conftests(self, module: Module) -> Iterator[Module]:
        """Files of fixtures in the folders above."""
        for folder in PurePosixPath(module.source.path).parents:
            name = f"{folder}/conftest.py".removeprefix("tests/")
            if conftest := self._modules.get(name.removesuffix(".py").replace("/", ".")):
                yield conftest

    def method(self, module: Module, owner: str, name: str) -> Iterator[tuple[Module, Function]]:
        """A method of a class or of its bases."""
        if function := module.functions.get((owner, name)):
            yield module, function
            return
        for base in module.bases.get(owner, ()):
            home, inner = self.target(module, base)
            if home and (home, inner) != (module, owner):
                yield from self.method(home, inner, name)

    def used_functions(
        self, module: Module, function: Function
    ) -> Iterator[tuple[Module, Function] | None]:
        """Functions of test code that a function uses; None is one of others that fails a test."""
        for use in function.uses:
            root, _, remainder = use.partition(".")
            last = remainder.rpartition(".")[2]
            home, name = self.target(module, use)
            if home is None:
                checks_values = ".assert_" in name and not name.startswith("typing")
                if name in ASSERTING or checks_values:
                    yield None
                continue
            if last.startswith("assert_"):
                yield None
            owner, _, attribute = name.partition(".")
            if not attribute:
                for place in (home, *self._conftests(module)):
                    if target_function := place.functions.get(("", name)):
                        yield place, target_function
            if owner in home.bases:
                for method in (attribute,) if attribute else CONSTRUCTION:
                    yield from self.method(home, owner, method)
            elif root in ("self", "cls") and function.owner:
                yield from self.method(module, function.owner, remainder)
            elif last:
                for place, kind in self.classes(module):
                    yield from self.method(place, kind, last)


def assertless_tests(tree: Tree) -> Iterator[Violation]:
    """Tests that can only fail by accident: no assert, no raises, no helper that has one.

    A helper is found through the imports of the file; a method by its name, in the classes that the
    file defines, imports or gets from a function or fixture.
    """
    names = NameResolver(tree.modules)
    for module in set(tree.modules.values()):
        for test in module.tests:
            if not _can_fail(names, module, test):
                yield module.source.violation(test.line, f"{test.name} asserts nothing")


def _can_fail(names: NameResolver, module: Module, test: Function) -> bool:
    waiting, visited = [(module, test)], {test}
    while waiting:
        home, function = waiting.pop()
        if function.asserts:
            return True
        for target in names.used_functions(home, function):
            if target is None:
                return True
            if target[1] not in visited:
                visited.add(target[1])
                waiting.append(target)
    return False


def test_names(tree: Tree) -> Iterator[Violation]:
    """NameResolver of tests that are long, or that have no subject."""
    for module in tree.modules.values():
        for test in module.tests:
            if len(test.name) > MAX_TEST_NAME:
                text = f"{test.name} has {len(test.name)} characters, over {MAX_TEST_NAME}"
                yield module.source.violation(test.line, text)
            if match := NO_SUBJECT.match(test.name):
                text = f"{test.name} begins with {match[1]!r}: name the object under test"
                yield module.source.violation(test.line, text)


def long_sleeps(tree: Tree) -> Iterator[Violation]:
    """Sleeps of test code over a constant number of seconds, also over one of another file."""
    names = NameResolver(tree.modules)
    for module in tree.modules.values():
        # The runner of the deep tier is no test; it gives processes time to say where they hang.
        for line, slept in () if module.source.path.startswith("tests/deep/") else module.sleeps:
            home, name = names.target(module, slept)
            try:
                seconds = float(slept)
            except ValueError:
                seconds = home.constants.get(name, 0.0) if home else 0.0
            if seconds > MAX_SLEEP:
                yield module.source.violation(line, f"sleeps for {seconds:g} s")


# --- documents ---

CONTRACT = "docs/contract.md"
FAMILIES = "OVAKPESDGXLCBRTM"
ROW = re.compile(
    r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \| (.*?) ?\| (.+?) \| (.*?) ?\| (.+?) \|$", re.MULTILINE
)
ROW_START = re.compile(r"^\| ([A-Z]\d+) \|", re.MULTILINE)
KIND = re.compile(r"required|reported|capabilit(y|ies)\b")
TESTED_BY = re.compile(r"`tests/|\bconformance \(|\bowed\b")
ID = rf"[{FAMILIES}][0-9]{{1,2}}"
LIST = rf"({ID}(?:(?:, | and | to ){ID})*)"
CITED = re.compile(rf"[Cc]lauses?:? {LIST}|\({LIST}\)")
RANGE = re.compile(r"([A-Z])(\d+) to \1(\d+)")
PATH = re.compile(r"`([a-z0-9_./]+)`")
MODULE = re.compile(r"`((?:hal|backends|balancer|pipeline|integrations|src|csrc)/[\w./]*)`")
CODE_SPAN = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
REPOSITORY_PATH = re.compile(
    r"(?<![\w/.:-])"
    r"(?:tests|benchmarks|tools|docs|examples|conformance|hal|backends|balancer|pipeline|integrations)"
    r"/(?:[a-z0-9_.-]+/)*"
    r"(?:[a-z0-9_.-]*[a-z0-9](?![\w*?{<\[$-]))?"
)
"""Up to a placeholder (`NAME`) or pattern (`*`); `git show COMMIT:PATH` names none."""
RECORD = re.compile(r", (?:at )?commit [0-9a-f]{7}")
"""Follows a command that was run once, as on the pages of results: it may be gone since."""
FORMERLY = "(there "
"""Precedes the name that a file had at the commit of a record."""
ENVIRONMENT = re.compile(r"^\[testenv:(.+)\]$", re.MULTILINE)
TOX_RUN = re.compile(r"\btox (?:run )?-e[ =]?([\w,-]+)")
CHANGELOG = "CHANGELOG.md"
"""Its entries name what there was when they were written."""
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
    """Clauses without their seven columns, numbered with gaps, or of no known kind."""
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
            yield contract.violation(line, f"{clause}: a clause has seven columns")
            continue
        if not KIND.match(row[3]):
            yield contract.violation(line, f"{clause}: {row[3]!r} is no kind of clause")
        if not TESTED_BY.search(row[7]):
            yield contract.violation(line, f"{clause}: says neither what tests it nor 'owed'")
        for path in PATH.findall(row[5]) + PATH.findall(row[7]):
            in_repository = REPOSITORY_PATH.match(path)  # in every document
            if "/" in path and not in_repository and not (tree.root / path).exists():
                yield contract.violation(line, f"{clause}: {path} does not exist")
    for family in FAMILIES:
        if expected[family] == 1:
            yield contract.violation(1, f"no clause of family {family}")


def cited_clauses(tree: Tree) -> Iterator[Violation]:
    """Citations of clauses that the contract does not have, in code and documents."""
    clause_ids = set(clauses(tree.text(CONTRACT)))
    for source in tree.sources.values():
        if source.is_code or source.path.startswith("docs/"):
            for position, clause in citations(source.text):
                if clause not in clause_ids:
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


def repository_paths(tree: Tree) -> Iterator[Violation]:
    """Paths in the code of documents, and environments of tox, that are not there."""
    environments = set(ENVIRONMENT.findall(tree.text("tox.ini")))
    for source in tree.sources.values():
        if source.suffix != ".md" or source.path == CHANGELOG:
            continue
        for code in CODE_SPAN.finditer(source.text):
            formerly = source.text.endswith(FORMERLY, 0, code.start())
            if formerly or RECORD.match(source.text, code.end()):
                continue
            for match in REPOSITORY_PATH.finditer(code[0]):
                # A path may be the one of a folder of its own, as of an example's; one table of
                # claims gives unit tests by their place below tests/unit.
                places = (tree.root, (tree.root / source.path).parent, tree.root / "tests/unit")
                if not any((place / match[0]).exists() for place in places):
                    line = source.line_of(code.start() + match.start())
                    yield source.violation(line, f"{match[0]} does not exist")
        for match in TOX_RUN.finditer(source.text):
            for name in set(re.findall(r"\w[\w-]*", match[1])) - environments:
                line = source.line_of(match.start())
                yield source.violation(line, f"tox.ini has no environment {name}")


# --- the package ---

PACKAGE = "src/equipoise"
PINS = "constraints.txt"
PIN = re.compile(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*")


GLOSSARY = "docs/glossary.md"
GONE_WORDS_HEADING = "## Appendix: words that are gone"
MAY_SAY_GONE_WORDS = frozenset(
    {GLOSSARY, "docs/design/renamed.md", "docs/deep-results.md", "CHANGELOG.md"}
)
"""The page of deep results has the commands and names of the commits that were run."""


def gone_words(tree: Tree) -> Iterator[Violation]:
    """Words that the glossary lists as gone, alone, in plural, or as a part of a name."""
    _, heading, appendix = tree.text(GLOSSARY).partition(GONE_WORDS_HEADING)
    words = re.findall(r"^[a-z]+(?:, [a-z]+)+,?$", appendix, re.MULTILINE)
    if not heading or not words:
        return
    names = re.findall("[a-z]+", " ".join(words))
    capitalized = [name.capitalize() for name in names]
    pattern = re.compile(
        rf"(?<![A-Za-z])(?:{'|'.join(names)})s?(?![a-z])|(?:{'|'.join(capitalized)})s?(?![a-z])"
    )
    for source in tree.sources.values():
        if source.path not in MAY_SAY_GONE_WORDS:
            for match in pattern.finditer(source.text):
                yield source.violation(source.line_of(match.start()), f"says {match[0]!r}")


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


FILE_RULES: tuple[FileRule, ...] = (pickle_use, foreign_words)
TREE_RULES: tuple[TreeRule, ...] = (
    assertless_tests,
    test_names,
    long_sleeps,
    contract_rows,
    cited_clauses,
    document_links,
    design_paths,
    repository_paths,
    gone_words,
    package_links,
    one_version,
    plain_pins,
    empty_folders,
)


def main(arguments: list[str]) -> int:
    """Prints what `check` finds; the exit status is 1 if it finds anything."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    violations = check(root)
    print(*violations, sep="\n", end="\n" if violations else "")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
