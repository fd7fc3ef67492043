"""Which test proves which claim, and in which tier: `python -m helpers.claims > docs/claims.md`.

Names of members (mutants, faults, modes) are read from the source of the tests, not by importing
them: they stand there as literals, and what they test is not installed everywhere.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from html import escape
from pathlib import Path

from helpers.harnesses.fault_matrix import LOSSES, TROUBLES
from helpers.paths import ROOT, TESTS

from equipoise.backends.virtual.profiles import PROFILES
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import EXPERT_PARALLEL, FAMILIES

CLAUSE = re.compile(
    r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \| (.*?) ?\| (.+?) \| (.*?) ?\| (.+?) \|$", re.MULTILINE
)
DEEP_MARK = "mark.deep"
SLOW_MARK = "mark.slow"
BOUNDS = ("LIMIT", "pytestmark")
"""Names of time bounds, which are larger too."""
LONGEST = 160
"""Characters of an expression that the page shows."""


class Tier(Enum):
    """What runs a test; the value is what somebody types."""

    PYTEST = "pytest"
    TOX = "tox"
    DEEP = "tox -e deep"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Claims of one kind, all proven by one test.

    Attributes:
        name: what the members are.
        proof: the file with the test, below tests/.
        token: a text in the source of the function that proves it.
        members: their names.
        says: how it is proven, in a few words.
        before: how many there were at commit BEFORE.
        moved: why only deep runs the proof, where that is so.
        removed: members of before whose subject was removed.
        removed_because: the reason.
    """

    name: str
    proof: str
    token: str
    members: Callable[[], Sequence[str]]
    says: str
    before: int
    moved: str = ""
    removed: Sequence[str] = ()
    removed_because: str = ""

    @property
    def removal(self) -> str:
        """What became of members that there are no more."""
        return f"{', '.join(self.removed)} {self.removed_because}" if self.removed else ""

    @property
    def tier(self) -> Tier:
        """The first tier that runs the proof. Raises ValueError where there is none."""
        tiers = [tier for _, tier in functions(TESTS / self.proof, self.token)]
        if not tiers:
            raise ValueError(f"{self.proof}: no test with {self.token!r}")
        return Tier.DEEP if self.moved else min(tiers, key=list(Tier).index)


BEFORE = "8c974b1"
"""The last commit with one tier for everything but deep runs; `Family.before` was counted there."""


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def literal(place: str, constant: str) -> Callable[[], Sequence[str]]:
    """Names of the members of a collection: keys of a dictionary, or of calls the argument `name`
    or else the first one that is a text. `place` is a file, or a folder of files, below tests/."""

    def read() -> Sequence[str]:
        path = TESTS / place
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        return [name for file in files for name in _collected(file, constant)]

    return read


def _collected(file: Path, constant: str) -> Iterator[str]:
    for statement in parsed(file).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            whole = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(one, ast.Name) and one.id == constant for one in whole):
                yield from _members(file, statement.value)


def _members(file: Path, value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Dict):
        yield from (_text(file, key) for key in value.keys)
    elif isinstance(value, ast.Tuple | ast.List):
        for element in value.elts:
            if isinstance(element, ast.Starred):
                yield from _collected(file, _source(element.value))
            else:
                yield _name_of(file, element)
    else:
        raise ValueError(f"{file}: {ast.unparse(value)[:40]} is no tuple and no dictionary")


def _source(value: ast.expr) -> str:
    """The constant that a collection takes members from: `*NAME`, or `*(f(x) for x in NAME)`."""
    collection = value.generators[0].iter if isinstance(value, ast.GeneratorExp) else value
    return ast.unparse(collection)


def _name_of(file: Path, element: ast.expr) -> str:
    if not isinstance(element, ast.Call):
        return _text(file, element)
    named = [word.value for word in element.keywords if word.arg == "name"]
    texts = [one for one in element.args if isinstance(one, ast.Constant)]
    return _text(file, [*named, *texts][0] if named or texts else element)


def _text(file: Path, value: ast.expr | None) -> str:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    raise ValueError(f"{file}: a member without a name")


def values(place: str, enumeration: str) -> Callable[[], Sequence[str]]:
    """Values of an enumeration, but those that say that nothing is wrong."""

    def read() -> Sequence[str]:
        file = ROOT / place
        for statement in parsed(file).body:
            if isinstance(statement, ast.ClassDef) and statement.name == enumeration:
                named = [each.value for each in statement.body if isinstance(each, ast.Assign)]
                return [name for name in (_text(file, one) for one in named) if name != "none"]
        raise ValueError(f"{place}: no {enumeration}")

    return read


def functions(file: Path, token: str) -> list[tuple[str, Tier]]:
    """Tests of a file whose source contains `token`, each with the first tier that runs it."""
    lines, tree = file.read_text("utf-8").splitlines(), parsed(file)
    module_marks = "".join(
        ast.unparse(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and "pytestmark" in ast.unparse(statement.targets[0])
    )
    tests = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test_"
        ):
            marks = [ast.unparse(each) for each in node.decorator_list]
            source = "\n".join([*marks, *lines[node.lineno - 1 : node.end_lineno]])
            own = [mark for mark in marks if not mark.startswith("pytest.mark.parametrize")]
            if token in source:
                tests.append((node.name, _tier(file, " ".join([module_marks, *own]))))
    return tests


def _tier(file: Path, marks: str) -> Tier:
    if DEEP_MARK in marks:
        return Tier.DEEP
    fast = file.is_relative_to(TESTS / "unit") and SLOW_MARK not in marks
    return Tier.PYTEST if fast else Tier.TOX


def clauses() -> list[tuple[str, str]]:
    """Clauses of the contract, each with what tests it."""
    page = (ROOT / "docs" / "contract.md").read_text("utf-8")
    return [(row[1], row[7]) for row in CLAUSE.finditer(page)]


def matrix() -> Sequence[str]:
    """Places of the fault matrix."""
    losses = [f"{how} in {where} ({commit})" for where, how, commit in LOSSES]
    return [*losses, *(f"{what} in {where} ({commit})" for what, where, commit in TROUBLES)]


def races() -> Sequence[str]:
    """Races that are planted in programs on simulated devices."""
    selftest = "simulators/npusim/selftest"
    one, two = (literal(f"{selftest}/race_{name}.py", "CASES")() for name in ("cases", "pair"))
    return [*one, *two]


SECTIONS: dict[str, Sequence[Family]] = {
    "The contract and its suite": (
        Family(
            name="properties of the conformance suite",
            proof="conformance/test_backends.py",
            token="add_clauses",
            members=lambda: [claim.name for name in FAMILIES for claim in suite.family(name)],
            says="`equipoise conformance` on the virtual backend, on the CPU backend over gloo "
            "with 4 and 8 ranks, and over MPI with 4 (75, 12 and 6 cases each); each is the one "
            "that rejects some mutant",
            before=82,
        ),
        Family(
            name="mutants of the conformance suite",
            proof="conformance/test_mutants.py",
            token="found.clause == mutant.clause",
            members=literal("conformance/mutants", "MUTANTS"),
            says="rejected by its property, for its clause",
            before=179,
        ),
        Family(
            name="profiles of the virtual backend with a vendor's trap",
            proof="conformance/test_virtual_profiles.py",
            token="PROFILES[name]",
            members=lambda: [*PROFILES],
            says="each keeps whatever it declares; real sizes and imports in deep only",
            before=9,
        ),
        Family(
            name="backends that do not cope with a trap",
            proof="conformance/test_virtual_profiles.py",
            token="TRAPS",
            members=literal("conformance/test_virtual_profiles.py", "TRAPS"),
            says="rejected by a property",
            before=5,
        ),
        Family(
            name="faults of a rank in a random program",
            proof="processes/conformance/properties/test_faults.py",
            token="list(RankFault)",
            members=values("hal/conformance/properties/faults.py", "RankFault"),
            says="survivors are told, and go on: on three processes",
            before=4,
        ),
        Family(
            name="healthy virtual backend from 20 seeds",
            proof="conformance/test_healthy_backend.py",
            token="SUBJECT",
            members=lambda: [claim.name for name in FAMILIES for claim in suite.family(name)],
            says="no false alarm",
            before=82,
            moved="a commit plays one seed, by the command `equipoise conformance`; before, it "
            "played two more here, of which one was the same",
        ),
    ),
    "Expert-parallel libraries": (
        Family(
            name="properties of an expert-parallel library",
            proof="conformance/test_expert_parallel.py",
            token="PROPERTIES",
            members=lambda: [claim.name for claim in suite.family(EXPERT_PARALLEL)],
            says="both forms of our exchange on the CPU backend over gloo with 4 ranks, 8 cases "
            "each; virtual ranks from 2 seeds, from 20 in deep; each rejects some mutant",
            before=0,
        ),
    ),
    "Protocols, explored": (
        Family(
            name="mutants of the engine",
            proof="exploration/engine/test_mutants.py",
            token="mutant.property in result.broken",
            members=literal("exploration/engine/mutants", "MUTANTS"),
            says="rejected by its property within 400 interleavings",
            before=36,
            removed=(
                "written-in-service",
                "retired-behind-the-write",
                "let-in-again",
                "retired-forgotten",
                "fill-not-checked",
            ),
            removed_because="were of slots that retire, which there are no more",
        ),
        Family(
            name="faults of the engine's exploration",
            proof="exploration/engine/test_exploration.py",
            token="set(FaultKind)",
            members=values("tests/exploration/engine/case.py", "FaultKind"),
            says="each strikes in drawn interleavings, and no property breaks",
            before=19,
        ),
        Family(
            name="properties of the engine's exploration",
            proof="exploration/engine/test_mutants.py",
            token="set(PROPERTIES)",
            members=literal("exploration/engine/oracle.py", "PROPERTIES"),
            says="each rejects some mutant, and holds on the healthy engine",
            before=9,
        ),
        Family(
            name="mutants of channels between stages",
            proof="exploration/channel/test_mutants.py",
            token="broken_by(mutant, BUDGET)",
            members=literal("exploration/channel/mutants.py", "MUTANTS"),
            says="rejected by its property",
            before=17,
        ),
        Family(
            name="faults of the channel's exploration",
            proof="exploration/channel/test_exploration.py",
            token="set(FAULTS)",
            members=values("tests/exploration/channel/case.py", "Fault"),
            says="the reader is told, or reads what was sent",
            before=5,
        ),
        Family(
            name="mutants of the expert exchange",
            proof="exploration/exchange/test_mutants.py",
            token="BUDGET",
            members=literal("exploration/exchange/mutants", "MUTANTS"),
            says="rejected by its property",
            before=21,
        ),
        Family(
            name="places of the fault matrix of a rebalance",
            proof="processes/balancer/test_rebalance_faults.py",
            token="matrix_row",
            members=matrix,
            says="ranks that are left serve one layout and go on; a commit plays a sample",
            before=93,
        ),
        Family(
            name="the same on simulated devices",
            proof="devices/test_engine_faults.py",
            token="matrix_row",
            members=matrix,
            says="a commit plays a sample, deep all of them",
            before=93,
        ),
    ),
    "Policies, kernels, requests": (
        Family(
            name="mutants of request policies",
            proof="unit/native/test_router_mutants.py",
            token="detects(mutant, seed)",
            members=literal("helpers/mutants/policy_mutants.py", "MUTANTS"),
            says="the comparison of the native router with the published rules rejects each",
            before=45,
        ),
        Family(
            name="mutants of the request simulator",
            proof="unit/native/test_simulation_mutants.py",
            token="detects(mutant, seed)",
            members=literal("helpers/mutants/simulation_mutants.py", "MUTANTS"),
            says="the comparison of the native simulator with its specification rejects each",
            before=18,
        ),
        Family(
            name="mutants of the request dispatcher",
            proof="unit/balancer/requests/test_dispatcher.py",
            token="MUTANTS[name]",
            members=literal("unit/balancer/requests/test_dispatcher.py", "MUTANTS"),
            says="a play of requests and workers against a model rejects each",
            before=0,
        ),
        Family(
            name="mutants of a policy that front ends share",
            proof="unit/balancer/requests/test_shared_policy.py",
            token="MUTANTS[name]",
            members=literal("unit/balancer/requests/test_shared_policy.py", "MUTANTS"),
            says="a play of front ends over slow links rejects each",
            before=0,
        ),
        Family(
            name="mutants of vLLM's request routing",
            proof="unit/integrations/vllm/dp/test_mutants.py",
            token="MUTANTS[name]",
            members=literal("unit/integrations/vllm/dp/test_mutants.py", "MUTANTS"),
            says="a play of clients and ranks rejects each",
            before=14,
        ),
        Family(
            name="mutants of Triton kernels",
            proof="unit/backends/cuda/kernels/test_kernel_mutants.py",
            token="CHECKS[mutant.check]",
            members=literal("helpers/mutants/kernel_mutants.py", "MUTANTS"),
            says="the check that it names rejects each, interpreted",
            before=30,
        ),
    ),
    "Devices, simulated": (
        Family(
            name="broken Ascend backends",
            proof="devices/test_suites.py",
            token="devices.conformance.trial",
            members=literal("devices/conformance/breakages.py", "BREAKAGES"),
            says="caught in 3 of 3 runs on one device, in 1 of 1 on two ranks; in deep 20 of 20",
            before=11,
        ),
        Family(
            name="Ascend backends with one operation of kernels or slots broken",
            proof="devices/test_suites.py",
            token="devices.conformance.trial",
            members=literal("conformance/mutants", "MUTATIONS"),
            says="caught in 20 of 20 runs for its clause; six of slots in CUDA's backend too",
            before=0,
            moved="a commit breaks the CPU and the virtual backend by the same ones",
        ),
        Family(
            name="broken CUDA backends",
            proof="devices/cuda/test_backend_mutants.py",
            token="breakage",
            members=literal("simulators/cudasim/breakages.py", "BREAKAGES"),
            says="rejected by its property",
            before=7,
            moved="each takes a process that loads torch_npu, for a stand-in of CUDA; what the "
            "backends of both vendors share is broken on a commit, in the eleven of Ascend",
        ),
        Family(
            name="broken communicators over NCCL",
            proof="devices/test_suites.py",
            token="devices.conformance.trial",
            members=literal("simulators/cudasim/nccl_breakages.py", "BREAKAGES"),
            says="caught in 20 of 20 runs, in deep",
            before=6,
            moved="a stand-in for a library that was never run: 36 CPU seconds, most of it "
            "waiting; the healthy communicator is still judged on a commit",
        ),
        Family(
            name="races planted in programs on a device",
            proof="devices/test_suites.py",
            token="npusim.selftest.races",
            members=races,
            says="each shows in 20 of 20 rounds under the schedule `lazy`, and its right variant "
            "in none; the other schedules in deep",
            before=6,
        ),
        Family(
            name="wrong programs on ranks of simulated devices",
            proof="devices/simulator/test_selftests.py",
            token='"hccl"',
            members=literal("simulators/npusim/selftest/hccl.py", "WRONG"),
            says="the driver reports each",
            before=7,
        ),
    ),
    "Engines": (
        Family(
            name="faults planted in vLLM",
            proof="engines/vllm/test_engine_runs.py",
            token="Fault.",
            members=values("tests/simulators/vllm_cpu/faults.py", "Fault"),
            says="each shows in the tokens: ours here and in `test_handover_runs.py`, vLLM's own "
            "in `test_stock_eplb.py`, `test_policy_runs.py`, `test_stock_pipeline.py`",
            before=5,
            moved="a start of vLLM costs a minute of processor time",
        ),
        Family(
            name="faults planted in vllm-ascend",
            proof="engines/vllm_ascend/test_handover.py",
            token="HANDOVER",
            members=values("tests/simulators/vllm_ascend_cpu/faults.py", "Fault"),
            says="each is noticed: in the hand-over here, in plans by `test_planner.py`",
            before=6,
        ),
        Family(
            name="holes of vLLM's CPU build",
            proof="engines/vllm/test_cpu_platform_gaps.py",
            token="hole",
            members=values("tests/simulators/vllm_cpu/missing_features.py", "Hole"),
            says="one that is not filled shows; that of the second model runner in "
            "`test_v2_model_runner.py`",
            before=8,
            moved="a start of vLLM costs a minute of processor time",
        ),
    ),
}
"""Families by section of the page."""
REASONS = {
    "benchmarks": "a benchmark that runs proves no claim",
    "conformance": "profiles and one rank repeat what the four commands of a commit judge; 20 "
    "seeds against false alarms",
    "devices": "`lazy` shows every planted race in each of 20 runs, `delay` two thirds of them, "
    "`eager` one; the default run takes minutes on simulated devices; tests of the simulator that "
    "take over half a CPU second run with it",
    "engines": "a start of vLLM costs a minute of processor time: a commit runs each part once",
    "helpers": "CUDA over the simulator repeats each test of Ascend",
    "processes": "a run of four ranks with all five variants costs 28 to 75 CPU seconds; a commit "
    "serves two ranks and one variant beside the reference; the proxy is loaded with one policy "
    "on a commit",
    "unit": "the planner is compiled again with other flags: 27 CPU seconds; a commit compares "
    "planners of one build with their references",
}
"""Why tests of a folder are marked deep."""
HEAD = """# Claims and their tests

Generated by `python -m helpers.claims > docs/claims.md` (with `tests` and `tests/simulators` on
`PYTHONPATH`). Three tiers run tests:

| tier | runs | when |
|---|---|---|
| `pytest` | `tests/unit` without what is marked `slow` | while you write |
| `tox` | everything that is not marked `deep` | every commit |
| `tox -e deep` | all of it, with more cases, schedules, seeds, modes | for what a change touches |

What the third tier found is on [a page of its own](deep-results.md).

A mutant is the healthy thing with one behaviour broken: a test that does not reject it proves
nothing. Each family below has a test that takes its members, or says which others do; the tier is
the first that runs it.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, *_clauses()]
    for title, families in SECTIONS.items():
        lines += ["", f"## {title}", "", *_families(families)]
    lines += [*_modes(), *_marked(), *_larger(), *_compared()]
    return "\n".join(lines).rstrip() + "\n"


def _clauses() -> Iterator[str]:
    rows = clauses()
    judged = [name for name, tested in rows if "conformance (" in tested]
    untested = [name for name, tested in rows if re.search(r"\bowed\b", tested)]
    yield "## Clauses of the contract"
    yield ""
    yield (
        f"{len(rows)} clauses: {len(judged)} are judged by properties of the suite, on every "
        "backend by name; the others by the files that [the contract](contract.md) names in its "
        f"last column; {len(untested)} owed. Both run on every commit, in the tier `tox`; "
        "[the matrix](conformance-matrix.md) says which backend keeps which."
    )
    yield ""
    by_clause: dict[str, list[str]] = {name: [] for name, _ in rows}
    for claim in suite.properties():
        for clause in claim.clauses:
            by_clause.setdefault(clause, []).append(claim.name)
    lines = [
        f"{name}: {', '.join([*by_clause[name], *re.findall(r'`(tests/[^`]+)`', tested)])}"
        for name, tested in rows
    ]
    yield _folded(f"{len(rows)} clauses, and what tests each", lines, "<br>\n")


def _families(families: Sequence[Family]) -> Iterator[str]:
    yield "| claims | number | test | tier | how |"
    yield "|---|---|---|---|---|"
    for family in families:
        cells = (family.name, len(family.members()), f"`tests/{family.proof}`")
        yield f"| {' | '.join(map(str, cells))} | `{family.tier.value}` | {family.says} |"
    yield ""
    for family in families:
        yield _folded(f"{len(family.members())} {family.name}", family.members(), ", ")


def _folded(title: str, names: Sequence[str], between: str) -> str:
    """A list that is shown when somebody asks for it."""
    items = between.join(escape(name) for name in names)
    return f"<details><summary>{escape(title)}</summary>\n{items}\n</details>\n"


def _modes() -> Iterator[str]:
    """How engines are run."""
    yield "## Modes of vLLM and vllm-ascend"
    yield ""
    yield "| test | what | on a commit | only in deep |"
    yield "|---|---|---|---|"
    for file in sorted((TESTS / "engines").rglob("test_*.py")):
        tests = functions(file, "")
        deep = sum(tier is Tier.DEEP for _, tier in tests)
        what = (ast.get_docstring(parsed(file)) or "").partition("\n")[0]
        yield f"| `{_relative_path(file)}` | {what} | {len(tests) - deep} | {deep} |"
    yield ""
    names = [
        f"{file.parent.name}/{file.stem}::{name} ({tier.value})"
        for file in sorted((TESTS / "engines").rglob("test_*.py"))
        for name, tier in functions(file, "")
    ]
    yield _folded(f"{len(names)} tests, with their tiers", names, "<br>\n")


def marked() -> dict[str, list[str]]:
    """Files with a test that only deep runs, by folder."""
    files_by_folder: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("*.py")):
        if file != Path(__file__) and DEEP_MARK in file.read_text("utf-8"):
            files_by_folder.setdefault(file.relative_to(TESTS).parts[0], []).append(
                _relative_path(file)
            )
    return files_by_folder


def _marked() -> Iterator[str]:
    yield "## What only `tox -e deep` runs"
    yield ""
    yield "| folder | files with tests marked `deep` | why |"
    yield "|---|---|---|"
    for folder, files in marked().items():
        names = ", ".join(f"`{name.removeprefix(f'tests/{folder}/')}`" for name in files)
        yield f"| `tests/{folder}` | {names} | {REASONS[folder]} |"
    yield ""


def larger() -> list[tuple[str, str, str, str]]:
    """Numbers that are larger in deep: file, name, on a commit, in deep."""
    files = [file for file in sorted(TESTS.rglob("*.py")) if " if DEEP " in file.read_text("utf-8")]
    rows = []
    for file in files:
        for name, parts in _named(parsed(file)):
            choices = [each for part in parts for each in ast.walk(part)]
            for one in choices:
                if isinstance(one, ast.IfExp) and ast.unparse(one.test) == "DEEP":
                    few, many = (ast.unparse(each)[:LONGEST] for each in (one.orelse, one.body))
                    rows.append((_relative_path(file), name, few, many))
    return rows


def _named(tree: ast.Module) -> Iterator[tuple[str, Sequence[ast.expr]]]:
    """What is assigned to a name, and what decorates a function, but time bounds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.decorator_list
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) not in BOUNDS:
            yield ast.unparse(node.targets[0]), [node.value]


def _larger() -> Iterator[str]:
    yield "## What is larger there"
    yield ""
    yield "Beside these, properties of unit tests play 5,000 examples where a commit plays 100."
    yield ""
    yield "| file | number | on a commit | in deep |"
    yield "|---|---|---|---|"
    for file, name, few, many in larger():
        yield f"| `{file}` | `{name}` | `{few}` | `{many}` |"
    yield ""


def _compared() -> Iterator[str]:
    yield f"## Compared with commit {BEFORE}"
    yield ""
    yield "Then a commit took 72 minutes. No family has lost a member."
    yield ""
    yield "| claims | then | now | in deep, or fewer, and why |"
    yield "|---|---|---|---|"
    for families in SECTIONS.values():
        for family in families:
            cells = (
                family.name,
                family.before,
                len(family.members()),
                family.moved or family.removal,
            )
            yield f"| {' | '.join(map(str, cells))} |"


def _relative_path(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    print(page(), end="")
