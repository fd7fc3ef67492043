"""Rules of tools/check_tree.py: each finds a planted violation, and harmless text is not reported.

A small tree that keeps every rule is planted once for each test; a violation is added to it, and
the whole check has to print that one and nothing else.
"""

from pathlib import Path

import pytest
from check_tree import CONTRACT, FAMILIES, FOLDERS, LINKED, check, citations, main, read_tree

ROOT = Path(__file__).resolve().parents[3]
ROWS = "".join(
    f"| {family}1 | Text. | required | core | `hal/a.py` | | conformance (ordering) |\n"
    for family in FAMILIES
)
LONG_NAME = "test_" + 76 * "a"
# In two parts, so that this file keeps the rules too.
WORD = "ses" + "sion"
HOME = "/ho" + "me/x"
USERS = "/Us" + "ers/me"
MOUNT = "/mn" + "t/data"
WINDOWS = "C:\\Us" + "ers"
CHECKS = """
class Clock:
    def check(self):
        assert self.ticks


class Watch(Clock):
    pass


def get(key):
    assert key


def watch() -> Watch:
    return Watch()
"""
FIXTURES = """
from collections.abc import Iterator

import pytest
from helpers.checks import Watch


@pytest.fixture
def clock() -> Watch:
    return Watch()


@pytest.fixture
def checked():
    yield
    assert x
"""
TOX = "[testenv:lint]\ncommands = true\n"
UNKNOWN = "X9" + "9"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a file in every folder, which keeps every rule."""
    for folder in FOLDERS:
        plant(tmp_path, f"{folder}/a.py", "x = 1\n")
    plant(tmp_path, CONTRACT, ROWS)
    plant(tmp_path, "docs/glossary.md", "## Appendix: words that are gone\n\nhull, slip\n")
    plant(tmp_path, "tox.ini", TOX)
    plant(tmp_path, "tests/helpers/checks.py", CHECKS)
    plant(tmp_path, "tests/helpers/bounds.py", "LONG = 20.0\n")
    plant(tmp_path, "tests/conftest.py", FIXTURES)
    plant(tmp_path, "pyproject.toml", '[project]\nversion = "1.0"\n')
    plant(tmp_path, "constraints.txt", "numpy==2.4.6\n")
    plant(tmp_path, "src/equipoise/__init__.py", '__version__ = "1.0"\n')
    for part in LINKED:
        (tmp_path / "src" / "equipoise" / part).symlink_to(Path("..", "..", part))
    return tmp_path


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def check_lines(root: Path) -> list[str]:
    """The violations that the check of `root` prints, one a line."""
    return [str(violation) for violation in check(root)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tests/b.py", "from pickle import loads\n", "tests/b.py:1: uses pickle"),
        ("benchmarks/b.py", "x = 1\nimport dill.source\n", "benchmarks/b.py:2: uses dill"),
        ("src/b.py", "import torch\n\ntorch.load('x')\n", "src/b.py:3: uses pickle"),
        (
            "hal/b.py",
            "import torch\n\ntorch.load('x', weights_only=False)\n",
            "hal/b.py:3: uses pickle",
        ),
        (
            "src/b.py",
            "import numpy as np\n\nnp.load('x', allow_pickle=True)\n",
            "src/b.py:3: uses pickle",
        ),
        ("src/b.py", "from torch import load\n", "src/b.py:1: uses pickle"),
        ("src/b.py", "import torch as t\n\nt.load('x')\n", "src/b.py:3: uses pickle"),
        ("src/b.py", "x = __import__('pickle')\n", "src/b.py:1: uses pickle"),
        (
            "src/b.py",
            "import importlib\n\nx = importlib.import_module('pickle')\n",
            "src/b.py:3: uses pickle",
        ),
        ("src/b.py", "np.load('x', allow_pickle=1)\n", "src/b.py:1: uses pickle"),
        ("src/b.py", "import joblib\n", "src/b.py:1: uses joblib"),
        ("src/b.py", "pandas.read_pickle('x')\n", "src/b.py:1: uses pickle"),
        ("docs/b.md", f"\nin this {WORD}\n", f"docs/b.md:2: says '{WORD}'"),
        ("hal/b.py", "# see /wo" + "rk/shared\n", "hal/b.py:1: says '/wo" + "rk'"),
        ("csrc/b.cpp", "// see /op" + "t/x\n", "csrc/b.cpp:1: says '/op" + "t'"),
        ("docs/b.md", f"see {HOME}/log\n", f"docs/b.md:1: says '{HOME}'"),
        ("docs/b.md", f"see {USERS}\n", f"docs/b.md:1: says '{USERS}'"),
        ("docs/b.md", f"see {MOUNT}\n", f"docs/b.md:1: says '{MOUNT}'"),
        ("docs/b.md", f"see {WINDOWS}\\x\n", "docs/b.md:1: says 'C:"),
        ("tox.ini", "index = https://py" + "pi.org\n", "tox.ini:1: says 'py" + "pi.'"),
        (
            "tests/test_b.py",
            "def test_clock():\n    print(1)\n",
            "tests/test_b.py:1: test_clock asserts nothing",
        ),
        (
            "tests/test_b.py",
            "def show():\n    print(1)\n\n\ndef test_clock():\n    show()\n",
            "tests/test_b.py:5: test_clock asserts nothing",
        ),
        (
            "tests/test_b.py",
            "import subprocess\n\n\ndef test_clock():\n    subprocess.run(['true'])\n\n\n"
            "class Other:\n    def run(self):\n        assert self\n",
            "tests/test_b.py:4: test_clock asserts nothing",
        ),
        (
            "tests/test_b.py",
            "def test_clock():\n    {}.get(1)\n",
            "tests/test_b.py:1: test_clock asserts nothing",
        ),
        (
            "tests/test_b.py",
            "def test_clock():\n    get(1)\n",
            "tests/test_b.py:1: test_clock asserts nothing",
        ),
        (
            "tests/test_b.py",
            "from helpers.checks import watch\n\n\ndef test_clock():\n    watch()\n",
            "tests/test_b.py:4: test_clock asserts nothing",
        ),
        *(
            (
                "tests/test_b.py",
                f"def test_clock():\n    assert {value}\n",
                "tests/test_b.py:1: test_clock asserts nothing",
            )
            for value in ("True", "1", "'x'", "1 == 1", "(1, 2)")
        ),
        ("tests/b.py", "import time\n\ntime.sleep(2)\n", "tests/b.py:3: sleeps for 2 s"),
        ("tests/b.py", "LONG = 2\n\nsleep(LONG)\n", "tests/b.py:3: sleeps for 2 s"),
        (
            "tests/b.py",
            "from helpers.bounds import LONG\n\nasyncio.sleep(LONG)\n",
            "tests/b.py:3: sleeps for 20 s",
        ),
        *(
            (
                "tests/test_b.py",
                f"def test_{name}():\n    assert x\n",
                f"test_{name} begins with {first!r}: name the object under test",
            )
            for name, first in (
                ("its_clock_ticks", "its"),
                ("everything_ticks", "everything"),
                ("one_is_left", "one"),
                ("works", "works"),
                ("runs_fine", "runs_fine"),
            )
        ),
        (
            "tests/test_b.py",
            "def test_nor_does_it_wait():\n    assert x\n",
            "tests/test_b.py:1: test_nor_does_it_wait begins with 'nor': name the object under "
            "test",
        ),
        (
            "tests/unit/test_b.py",
            f"class TestA:\n    def {LONG_NAME}(self):\n        assert x\n",
            f"tests/unit/test_b.py:2: {LONG_NAME} has 81 characters, over 80",
        ),
        (CONTRACT, ROWS + "| T2 | Text. | required | core | |\n", "T2: a clause has seven columns"),
        (
            CONTRACT,
            ROWS + "| T2 | Text. | wanted | core | `hal/a.py` | | owed |\n",
            "T2: 'wanted' is no kind of clause",
        ),
        (
            CONTRACT,
            ROWS + "| T2 | Text. | required | core | `hal/a.py` | | soon |\n",
            "T2: says neither what tests it nor 'owed'",
        ),
        (
            CONTRACT,
            ROWS + "| T2 | Text. | required | core | `csrc/gone.h` | | owed |\n",
            "T2: csrc/gone.h does not exist",
        ),
        (
            CONTRACT,
            ROWS + "| T2 | Text. | required | core | `hal/` | | `tests/gone.py` |\n",
            "tests/gone.py does not exist",
        ),
        (CONTRACT, ROWS + ROWS.splitlines()[-1] + "\n", "M1: expected M2"),
        (CONTRACT, ROWS.replace("| T1 |", "| T2 |"), "T2: expected T1"),
        (CONTRACT, "".join(ROWS.splitlines(keepends=True)[:-1]), "no clause of family M"),
        ("hal/b.py", f"# (clause {UNKNOWN})\n", f"hal/b.py:1: clause {UNKNOWN} is not in"),
        ("docs/b.md", "\n[a](gone.md)\n", "docs/b.md:2: gone.md does not exist"),
        ("README.md", "[a](docs/gone.md#b)\n", "README.md:1: docs/gone.md does not exist"),
        ("docs/design/b.md", "`hal/gone.py`\n", "docs/design/b.md:1: hal/gone.py does not exist"),
        ("docs/b.md", "\n`tests/gone.py`\n", "docs/b.md:2: tests/gone.py does not exist"),
        (
            "docs/b.md",
            "Run it:\n\n```\npython benchmarks/gone.py --all\n```\n",
            "docs/b.md:4: benchmarks/gone.py does not exist",
        ),
        ("README.md", "`docs/gone/*.md`\n", "README.md:1: docs/gone/ does not exist"),
        (
            "docs/b.md",
            "`python benchmarks/gone.py` at commit 0123abc\n",
            "docs/b.md:1: benchmarks/gone.py does not exist",
        ),
        ("docs/b.md", "`tox -e ranks`\n", "docs/b.md:1: tox.ini has no environment ranks"),
        ("README.md", "    tox run -e lint,ranks\n", "tox.ini has no environment ranks"),
        ("hal/b.py", "free_slips = 1\n", "hal/b.py:1: says 'slips'"),
        ("docs/b.md", "\nan OldSlip\n", "docs/b.md:2: says 'Slip'"),
        ("src/equipoise/__init__.py", '__version__ = "1.1"\n', "__version__ is not 1.0"),
        ("constraints.txt", "numpy>=2\n", "constraints.txt:1: 'numpy>=2' is not NAME==VERSION"),
        ("constraints.txt", "torch==2.13.0+cpu\n", "'torch==2.13.0+cpu' is not NAME==VERSION"),
        ("constraints.txt", "", "constraints.txt:1: has no pins"),
    ],
)
def test_planted_violation_is_printed(tree: Path, name: str, text: str, expected: str) -> None:
    plant(tree, name, text)
    (line,) = check_lines(tree)
    assert line.startswith(f"{name}:")
    assert expected in line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hal/b.py", '"""As in vLLM #1; NCCL hangs here."""\n\ncuda = "cuda:0"\n'),
        ("hal/b.py", "import torch\n\ntorch.load('x', weights_only=True)\n"),
        ("benchmarks/lib/handovers.py", "import pickle\n\nx = pickle\n"),
        ("tests/test_b.py", "def tell():\n    assert x\n\n\ndef test_clock():\n    tell()\n"),
        (
            "tests/test_b.py",
            "import pytest\n\n\ndef test_clock():\n    with pytest.raises(E):\n        f()\n",
        ),
        *(
            ("tests/test_b.py", f"{imports}\n\n\ndef test_clock({fixture}):\n    {call}\n")
            for imports, fixture, call in (
                ("from helpers.checks import get", "", "get(1)"),
                ("from helpers import checks", "", "checks.get(1)"),
                ("import helpers.checks", "", "helpers.checks.get(1)"),
                ("from helpers.checks import get as look", "", "run(look)"),
                ("from helpers.checks import Watch", "", "Watch().check()"),
                ("from helpers.checks import watch", "", "watch().check()"),
                ("", "clock", "clock.check()"),
                ("", "checked", "f()"),
                ("import numpy as np", "", "np.testing.assert_array_equal(x, y)"),
                ("from torch.testing import assert_close", "", "assert_close(x, y)"),
                ("from pytest import raises", "", "raises(E, f)"),
                (
                    "from hypothesis.stateful import run_state_machine_as_test",
                    "",
                    "run_state_machine_as_test(M)",
                ),
            )
        ),
        (
            "tests/test_b.py",
            "class Checks:\n    def check(self):\n        assert self\n\n\n"
            "class TestClock(Checks):\n    def test_clock(self):\n        self.check()\n",
        ),
        ("tests/test_b.py", "def test_clock():\n    f()\n    assert False\n"),
        ("tests/test_b.py", "def test_one_worker_works():\n    assert x\n"),
        ("tests/b.py", "SHORT = 0.5\n\nsleep(SHORT)\n"),
        ("docs/b.md", "`git show 0123abc:tests/gone.py`, `tests/NAME/`, `tests/{b,c}.py`\n"),
        ("docs/b.md", "`python benchmarks/gone.py`, commit 0123abc, 2026-11-24\n"),
        ("docs/b.md", "`benchmarks/a.py` at commit 0123abc (there `benchmarks/gone.py`)\n"),
        ("CHANGELOG.md", "`tests/gone.py` and `tox -e ranks` are gone\n"),
        ("docs/b.md", "`tox -e lint`, `tox -e lint -- -x`, /path/to/x, /dev/shm\n"),
        ("docs/b.md", "https://example.org/ho" + "me/x\n"),
        ("tests/helpers/b.py", "def test_what_it_gives():\n    pass\n"),
        ("tests/test_b.py", f"def {LONG_NAME[:-1]}():\n    assert x\n"),
        ("tests/test_b.py", "def test_items_that_wait_are_served():\n    assert x\n"),
        ("tests/conftest.py", f'import time\n\ntime.sleep(0.5)\nscope = "{WORD}"  # {WORD}\n'),
        ("docs/b.md", "This works at home/work.\n"),
        ("hal/b.py", "slipped = landslip + slippery\n"),
        ("docs/b.md", "[a](contract.md#o-order), [b](https://example.org/x)\n"),
        ("docs/design/b.md", "`hal/a.py`, `balancer/`, `somewhere/else.py`\n"),
    ],
)
def test_harmless_text_is_not_reported(tree: Path, name: str, text: str) -> None:
    plant(tree, name, text)
    assert check_lines(tree) == []


def test_package_folder_that_is_no_link_is_reported(tree: Path) -> None:
    """A checkout without links, and a link that points elsewhere."""
    hal, balancer = (tree / "src" / "equipoise" / part for part in ("hal", "balancer"))
    hal.unlink()
    hal.mkdir()
    balancer.unlink()
    balancer.symlink_to(Path("..", "..", "pipeline"))
    assert check_lines(tree) == [
        "src/equipoise/balancer:1: is not a link to ../../balancer",
        "src/equipoise/hal:1: is not a link to ../../hal",
    ]


def test_folder_without_files_is_reported(tree: Path) -> None:
    (tree / "csrc" / "a.py").unlink()
    assert check_lines(tree) == ["csrc:1: no file was read here"]


def test_linked_files_are_read_once(tree: Path) -> None:
    assert [path for path in read_tree(tree).sources if path.endswith("hal/a.py")] == ["hal/a.py"]


@pytest.mark.parametrize(("text", "status"), [("x = 1\n", 0), ("import pickle\n", 1)])
def test_exit_status_tells_whether_rules_are_kept(tree: Path, text: str, status: int) -> None:
    plant(tree, "hal/b.py", text)
    assert main([str(tree)]) == status


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(clause O1)", {"O1"}),
        (f"see clause {UNKNOWN}", {UNKNOWN}),
        (f"({UNKNOWN}, O1 and K2)", {UNKNOWN, "O1", "K2"}),
        ("(clauses K1, K2)", {"K1", "K2"}),
        ("a thread ends (K5).", {"K5"}),
        ("Clauses: V1 to V3, A2.", {"V1", "V2", "V3", "A2"}),
        ("(O5, L1 to L3)", {"O5", "L1", "L2", "L3"}),
        ("int8 and float16, version 0.1, T = 4", set()),
    ],
)
def test_citations_are_recognised(text: str, expected: set[str]) -> None:
    assert {clause for _, clause in citations(text)} == expected


def test_citations_of_hal_are_recognised() -> None:
    """A pattern that matched nothing would find no unknown clause either."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hal").glob("*.py"))
    assert {"O1", "O3", "O4", "A1", "K1", "K2", "V3"} <= {clause for _, clause in citations(text)}
