"""What tools/check_install.py reads from README and tox.ini, and what it tells of pip's answer."""

import pytest
from check_install import (
    ROOT,
    cases,
    pythons,
    readme_lines,
    reason,
    requirements,
    spelt_out,
    tox_environments,
    wrong_claims,
)

README = (ROOT / "README.md").read_text(encoding="utf-8")
TOX = """
[testenv]
set_env =
    PIP_CONSTRAINT = {tox_root}{/}constraints.txt
[testenv:plain]
deps =
    ruff
    numpy; python_version < "3.12"
[testenv:project]
skip_install = false
deps =
    -r {tox_root}{/}requirements.txt
    {tox_root}{/}tests
    {[testenv:plain]deps}
set_env =
    {[testenv]set_env}
    PYTHONPATH = {tox_root}
[testenv:other]
deps = ruff
set_env =
    PIP_CONSTRAINT = {tox_root}{/}other.txt
[testenv:nothing]
commands = true
"""


def test_readme_has_two_lines_that_install() -> None:
    assert readme_lines(README) == [
        "-c constraints.txt '.[plots]'",
        "-c constraints.txt tox",
    ]


def test_project_is_replaced_by_its_requirements() -> None:
    plain = spelt_out(["-c", "constraints.txt", "."])
    assert plain == ("-c", "constraints.txt", *requirements())
    assert any(requirement.startswith("torch>=") for requirement in plain)
    plots = set(spelt_out([".[plots,mpi]"])) - set(plain)
    assert {requirement.partition(">")[0] for requirement in plots} == {
        "matplotlib",
        "mpi4py",
        "mpich",
    }


def test_every_line_of_readme_is_resolved_on_every_python_with_both_torches() -> None:
    resolved = {(case.python, case.name, case.cpu) for case in cases(README)}
    for python in pythons():
        for cpu in (False, True):
            assert (python, "pip install -c constraints.txt '.[plots]'", cpu) in resolved
        assert (python, "pip install -c constraints.txt tox", False) in resolved


def test_tox_environments_are_read_with_their_constraints() -> None:
    constraint = ("-c", f"{ROOT}/constraints.txt")
    plain = ("ruff", 'numpy; python_version < "3.12"')
    assert dict(tox_environments(TOX)) == {
        "plain": (*plain, *constraint),
        "project": (*plain, *requirements(), *constraint),
        "other": ("ruff", "-c", f"{ROOT}/other.txt"),
    }


def test_readme_claims_what_is_resolved() -> None:
    assert list(wrong_claims(README)) == []


@pytest.mark.parametrize(
    ("claim", "other"),
    [
        ("Python 3.11 or 3.12", "Python 3.11 or newer"),
        ("torch 2.11 or newer", "torch 2.10 or newer"),
        ("'.[plots]'", "equipoise"),
    ],
)
def test_wrong_claim_of_readme_is_reported(claim: str, other: str) -> None:
    (line,) = wrong_claims(README.replace(claim, other))
    assert line.startswith("README.md:1: ")


def test_reason_is_what_pip_says_without_progress_and_advice() -> None:
    output = (
        "Collecting torch\nERROR: Cannot install torch\n\nThe conflict is caused by:\n"
        "    torch depends on triton==3.7.1\n\nTo fix this you could try to:\n1. loosen\n"
    )
    assert reason(output) == (
        "ERROR: Cannot install torch\n\nThe conflict is caused by:\n"
        "    torch depends on triton==3.7.1"
    )
    assert reason("killed\n") == "killed"
