"""What tools/check_install.py reads from README and tox.ini, and what it tells of pip's answer."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_install
import pytest
from check_install import (
    ROOT,
    Case,
    Unreachable,
    Unresolved,
    cases,
    examine,
    main,
    pythons,
    readme_lines,
    reason,
    requirements,
    resolve,
    spelt_out,
    tox_environments,
    where_to_change,
    wrong_claims,
)

CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
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
        "-c constraints.txt '.[demo]'",
        "-c constraints.txt tox",
    ]


def test_project_is_replaced_by_its_requirements() -> None:
    plain = spelt_out(["-c", "constraints.txt", "."])
    assert plain == ("-c", "constraints.txt", *requirements())
    assert not any(requirement.startswith("torch") for requirement in plain)
    further = set(spelt_out([".[demo,mpi]"])) - set(plain)
    names = {requirement.partition(">")[0] for requirement in further}
    assert names == {"torch", "matplotlib", "mpi4py", "mpich"}


def test_install_beside_vllm_ascend_keeps_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [case for case in cases(README) if case.beside]
    assert [case.python for case in found] == pythons()
    asked = []

    def resolved(python: str, arguments: tuple[str, ...], variables: object) -> dict[str, Any]:
        asked.append(arguments)
        required = ["torch==2.10.0", "triton-ascend==3.2.2", "numba"]
        versions = {"torch": "2.10.0+cpu", "numba": "0.60"}
        if arguments == ("vllm-ascend==0.23.0", "--no-deps"):
            return {"vllm-ascend": {"version": "0.23.0", "requires_dist": required}}
        return {name: {"version": version} for name, version in versions.items()}

    monkeypatch.setattr(check_install, "resolve", resolved)
    message = examine(found[0], Path("links"), {})
    pins = "memcache_hybrid==1.2.0", "memfabric_hybrid==1.2.0"
    links = "--find-links", "links"
    assert asked[1:] == [
        ("torch==2.10.0", "numba", *pins, *links),
        (*requirements("torch"), "torch==2.10.0+cpu", "numba==0.60", *links),
    ]
    assert message == "2 packages, 2 of them unchanged, torch 2.10.0+cpu"


def test_every_line_of_readme_is_resolved_on_every_python_with_both_torches() -> None:
    resolutions = {(case.python, case.name, case.cpu) for case in cases(README)}
    for python in pythons():
        for cpu in (False, True):
            assert (python, "pip install -c constraints.txt '.[demo]'", cpu) in resolutions
        assert (python, "pip install -c constraints.txt tox", False) in resolutions


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
        ("torch 2.10 or newer", "torch 2.9 or newer"),
        ("'.[demo]'", "equipoise"),
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


Run = Callable[..., object]
CONFLICT = """Collecting numpy
ERROR: Cannot install numpy
The conflict is caused by:
    The user requested numpy>=99
    The user requested (constraint) numpy=={version}
"""


def fail_with(output: str) -> Run:
    return lambda command, **_: subprocess.CompletedProcess(command, 1, stdout=output)


def time_out(command: list[str], timeout: float, **_: object) -> object:
    raise subprocess.TimeoutExpired(command, timeout)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Replaces what pip does; the version of the one that is here does not matter."""
    monkeypatch.delenv("EQUIPOISE_OFFLINE", raising=False)
    monkeypatch.setattr(check_install, "version", lambda _: "99.0")
    monkeypatch.setattr(check_install, "environment", dict)
    monkeypatch.setattr(check_install, "write_cpu_torch", lambda *_: None)
    return lambda run: monkeypatch.setattr(subprocess, "run", run)


def test_pip_that_does_not_end_is_a_failure_of_its_case(
    pip: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip(time_out)
    with pytest.raises(Unresolved, match="pip did not end within 600 s"):
        resolve("3.11", ("numpy",), {})
    assert main(["Python 3.11: tox -e docs"]) == 1
    assert "FAILED  Python 3.11: tox -e docs\npip did not end" in capsys.readouterr().out


def test_failure_ends_with_files_lines_and_command(
    pip: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = (line for line in pins if line.startswith("numpy=="))
    pip(fail_with(CONFLICT.format(version=pin.removeprefix("numpy=="))))
    name = "Python 3.11, CPU torch: pip install -c constraints.txt '.[demo]'"
    assert main([name]) == 1
    change, reproduce = capsys.readouterr().out.splitlines()[-2:]
    readme = README[: README.index("pip install -c constraints.txt '.[demo]'")].count("\n") + 1
    assert change == f"change: README.md:{readme}, constraints.txt:{pins.index(pin) + 1}"
    assert reproduce.startswith("reproduce: python tools/check_install.py ")
    assert shlex.split(reproduce)[-1] == name


def test_advice_finds_pin_that_index_does_not_have() -> None:
    case = Case("tox -e lint", "3.11", ("ruff", "-c", f"{ROOT}/constraints.txt"), "tox.ini:7")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    error_line = f"ERROR: No matching distribution found for {pins[4]}"
    assert where_to_change(case, error_line).startswith("change: tox.ini:7, constraints.txt:5\n")


def test_every_case_has_a_line_of_origin() -> None:
    for case in cases(README):
        path, number = case.origin.split(":")
        line = (ROOT / path).read_text(encoding="utf-8").splitlines()[int(number) - 1]
        command = case.name.removeprefix("pip install ")
        environment = f"[testenv:{case.name.removeprefix('tox -e ')}]"
        assert command in line or line == environment or '"torch>=' in line, case


def test_unreachable_index_is_one_line(
    pip: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip(fail_with("WARNING: Retrying: NameResolutionError\nERROR: No matching distribution\n"))
    with pytest.raises(Unreachable):
        resolve("3.11", ("numpy",), {})
    assert main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "check_install: the package index cannot be reached; EQUIPOISE_OFFLINE=1 skips this check"
    )


def test_offline_check_prints_skip_line_that_ci_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EQUIPOISE_OFFLINE", "1")
    monkeypatch.setattr(check_install, "environment", None)
    assert main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -aE '(.*SKIP.*)' ", script)
    assert re.search(pattern, line)


def test_unknown_case_is_refused(
    pip: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tox -e gone"]) == 1
    assert capsys.readouterr().out == "check_install: no case is called tox -e gone\n"


def test_constraints_leave_packages_of_torch_to_torch() -> None:
    """Each torch requires versions of its own, which a pin for another makes impossible."""
    names = [line.partition("==")[0].lower() for line in CONSTRAINTS.splitlines()]
    assert [name for name in names if name.startswith(("triton", "nvidia"))] == []
