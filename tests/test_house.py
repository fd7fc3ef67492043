"""The tree keeps the rules of the house, and every rule is able to find its violation."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import house_assertions
import house_rules
import pytest

import equipoise

ROOT = Path(__file__).resolve().parent.parent
Rule = Callable[[Path], list[str]]
RULES: tuple[Rule, ...] = (
    house_rules.long_files,
    house_rules.long_functions,
    house_rules.relative_imports,
    house_rules.missing_docstrings,
    house_rules.vendor_names,
    house_rules.picklers,
    house_rules.strange_words,
    house_rules.wrong_links,
    house_assertions.assertless_tests,
    house_assertions.long_sleeps,
)
LONG_BODY = "    x = 1\n" * 40
PLANTED: tuple[tuple[Rule, str, str], ...] = (
    (house_rules.long_files, "csrc/a.cpp", "//\n" * 401),
    (house_rules.long_functions, "hal/a.py", f"def f():\n{LONG_BODY}"),
    (house_rules.long_functions, "csrc/a.cpp", "int f(int x) {\n" + "    ++x;\n" * 40 + "}\n"),
    (house_rules.relative_imports, "hal/a.py", "from . import errors\n"),
    (house_rules.relative_imports, "balancer/a.py", "from hal.stream import Stream\n"),
    (house_rules.relative_imports, "pipeline/a.py", "import hal\n"),
    (house_rules.missing_docstrings, "hal/a.py", '"""A."""\n\n\nclass A:\n    x = 1\n'),
    (house_rules.missing_docstrings, "hal/a.py", '"""A."""\n\n\ndef f():\n    return 1\n'),
    (house_rules.missing_docstrings, "hal/a.py", "x = 1\n"),
    (house_rules.vendor_names, "balancer/a.py", "use_nccl = True\n"),
    (house_rules.vendor_names, "pipeline/a.py", 'device = "cuda:0"\n'),
    (house_rules.vendor_names, "hal/a.py", "class AscendStream:\n    pass\n"),
    (house_rules.picklers, "tests/a.py", "from pickle import loads\n"),
    (house_rules.picklers, "benchmarks/a.py", "import pickle\n"),
    (house_rules.picklers, "src/a.py", "import torch\n\ntorch.load('x')\n"),
    (house_rules.picklers, "src/a.py", "import numpy as np\n\nnp.load('x', allow_pickle=True)\n"),
    (house_rules.strange_words, "docs/a.md", "in this ses" + "sion\n"),
    (house_rules.strange_words, "hal/a.py", "# see /wo" + "rk/shared\n"),
    (house_rules.strange_words, "tox.ini", "index = https://py" + "pi.org\n"),
    (house_assertions.assertless_tests, "tests/test_a.py", "def test_a():\n    print(1)\n"),
    (house_assertions.long_sleeps, "tests/test_a.py", "import time\n\ntime.sleep(2)\n"),
)
HARMLESS: tuple[tuple[str, str], ...] = (
    (
        "hal/a.py",
        '"""Learnt from vLLM #1."""\n\nfrom equipoise.hal import errors\n\n'
        "# NCCL hangs here, issue 783.\nx = errors\n",
    ),
    ("balancer/formats/a.py", '"""A."""\n\nname = "vllm"\n'),
    ("tests/test_a.py", "def tell():\n    assert 1\n\n\ndef test_a():\n    tell()\n"),
    (
        "tests/test_b.py",
        "import pytest\n\n\ndef test_a():\n    with pytest.raises(E):\n        f()\n",
    ),
    ("tests/conftest.py", 'import time\n\ntime.sleep(0.5)\nscope = "ses' + 'sion"\n'),
    ("docs/a.md", "This works at home/work.\n"),
    ("balancer/compat/a.py", '"""A."""\n\nvllm = 1\n'),
    ("benchmarks/handover_coordinator.py", '"""A."""\n\nimport pickle\n\nx = pickle\n'),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    """Every rule of the house, over the whole tree."""
    found = rule(ROOT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    """A rule that cannot fail says nothing."""
    _plant(tmp_path, name, text)
    found = rule(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_is_allowed_is_not_reported(rule: Rule, tmp_path: Path) -> None:
    """Citations, helpers that assert, short sleeps."""
    for name, text in HARMLESS:
        _plant(tmp_path, name, text)
    _link(tmp_path)
    assert rule(tmp_path) == []


def test_a_folder_in_place_of_a_link_is_found(tmp_path: Path) -> None:
    """A checkout without links, and a link that points elsewhere."""
    _link(tmp_path)
    hal, balancer = (tmp_path / "src" / "equipoise" / part for part in ("hal", "balancer"))
    hal.unlink()
    hal.mkdir()
    balancer.unlink()
    balancer.symlink_to(Path("..", "..", "pipeline"))
    found = house_rules.wrong_links(tmp_path)
    assert [line.partition(":")[0] for line in found] == [
        "src/equipoise/hal",
        "src/equipoise/balancer",
    ]


def test_the_tree_is_seen() -> None:
    """Rules over no files would be kept by any tree."""
    found = {path.relative_to(ROOT).parts[0] for path in house_rules.code_files(ROOT)}
    assert found == set(house_rules.FOLDERS)
    assert len(house_rules.file_sizes(ROOT)) > 50
    assert len(house_rules.function_sizes(ROOT)) > 200


def test_the_largest_are_told_longest_first(tmp_path: Path) -> None:
    for lines, name in ((3, "a"), (5, "b"), (4, "c")):
        body = "    x = 1\n" * (lines - 1)
        _plant(tmp_path, f"hal/{name}.py", f"def {name}():\n{body}")
    assert house_rules.largest(tmp_path, 2) == [
        "largest files, of 3: hal/b.py 5, hal/c.py 4",
        "largest functions, of 3: hal/b.py:1 b 5, hal/c.py:1 c 4",
    ]


def test_the_version_is_said_once_and_alike() -> None:
    """In the package and in the project's metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == equipoise.__version__


def test_every_pin_names_a_plain_version() -> None:
    """A local label, or a range, could not be resolved elsewhere."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert lines
    assert [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)
    ] == []


def test_the_build_stops_loudly_where_links_are_missing(tmp_path: Path) -> None:
    """The guard of setup.py, on copies of the tree with and without links."""
    for name in ("whole", "broken"):
        _copy_build(tmp_path / name)
    _link(tmp_path / "whole")
    whole, broken = (_run(["setup.py", "--name"], tmp_path / n) for n in ("whole", "broken"))
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.split()[-1] == "equipoise"
    assert broken.returncode != 0
    assert "core.symlinks true" in broken.stderr


PLANTED_IMPORTS = (
    ("balancer/planted.py", "equipoise.backends.cpu", "The core is backend-neutral"),
    ("hal/planted.py", "equipoise.balancer.experts", "The floors of the house"),
    ("balancer/planted.py", "equipoise.pipeline.exchange", "The floors of the house"),
    ("pipeline/planted.py", "vllm", "No vendor and no engine outside backends and integrations"),
)


@pytest.mark.parametrize(("name", "imported", "contract"), PLANTED_IMPORTS)
def test_a_planted_import_breaks_its_contract(
    name: str, imported: str, contract: str, tmp_path: Path
) -> None:
    """The import contract of pyproject.toml, on a copy of the tree."""
    copy = _copy_package(tmp_path)
    clean = _lint_imports(copy)
    assert clean.returncode == 0, clean.stdout
    _plant(copy, name, f'"""Planted."""\n\nimport {imported}\n')
    broken = _lint_imports(copy)
    assert broken.returncode == 1
    assert re.search(rf"^{re.escape(contract)} BROKEN", broken.stdout, re.MULTILINE)


def _plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".py":
        ast.parse(text)


def _link(root: Path) -> None:
    package = root / "src" / "equipoise"
    package.mkdir(parents=True, exist_ok=True)
    for part in house_rules.PARTS:
        (root / part).mkdir(exist_ok=True)
        (root / part / "__init__.py").touch()
        (package / part).symlink_to(Path("..", "..", part))


def _copy_build(root: Path) -> None:
    (root / "src" / "equipoise").mkdir(parents=True)
    (root / "src" / "equipoise" / "__init__.py").touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)


def _copy_package(root: Path) -> Path:
    only_code = shutil.ignore_patterns("__pycache__", "*.so", "text", "weights", *house_rules.PARTS)
    shutil.copytree(ROOT / "src", root / "src", ignore=only_code)
    for part in house_rules.PARTS:
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        (root / "src" / "equipoise" / part).symlink_to(Path("..", "..", part))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def _lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return _run(["-c", program, "--no-cache"], root)


def _run(arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
