"""tools/check_wheels.py reports what a wheel lacks, and what it must not have."""

import subprocess
import sys
from pathlib import Path

import check_wheels
import pytest
from check_installed import PACKAGE, modules
from check_wheels import (
    LICENCES,
    PROJECT,
    VERSION,
    Fault,
    call,
    data_files,
    faults,
    interpreters,
)

INFORMATION = f"equipoise-{VERSION}.dist-info"
METADATA = f"{INFORMATION}/METADATA"
CORE = "equipoise/_native.cpython-311-x86_64-linux-gnu.so"
WEIGHTS = "equipoise/demo/weights/model.safetensors"
# Put together from parts: a rule of the tree refuses such a path.
FOLDER = "/ho" + "me/somebody/equipoise"


@pytest.fixture(scope="module")
def wheel() -> dict[str, bytes]:
    """Contents of a wheel with which nothing is wrong."""
    files = {**modules(PACKAGE), **data_files(PACKAGE), **dict.fromkeys(LICENCES, b"")}
    ours = {f"equipoise/{name}": content for name, content in files.items()}
    required = [f"Requires-Dist: {requirement}" for requirement in PROJECT["dependencies"]]
    required.append('Requires-Dist: torch>=2.10; extra == "torch"')
    return {
        **ours,
        CORE: b"\x7fELF /usr/lib/x86_64-linux-gnu/libc.so.6",
        f"{INFORMATION}/licenses/LICENSE": b"",
        METADATA: "\n".join(required).encode(),
    }


def test_whole_wheel_has_no_faults(wheel: dict[str, bytes]) -> None:
    assert list(faults(wheel)) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (CORE, "the native core is missing"),
        ("equipoise/hal/errors.py", "equipoise/hal/errors.py is not as in the tree"),
        ("equipoise/py.typed", "equipoise/py.typed is not as in the tree"),
        (WEIGHTS, f"{WEIGHTS} is not as in the tree"),
        ("equipoise/licenses/nanobind.txt", "equipoise/licenses/nanobind.txt is missing"),
        (f"{INFORMATION}/licenses/LICENSE", "the licence is missing"),
        (METADATA, "requires nothing where no extra is named"),
    ],
)
def test_missing_file_is_reported(wheel: dict[str, bytes], name: str, message: str) -> None:
    assert list(faults({path: wheel[path] for path in wheel if path != name})) == [message]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tests/test_a.py", b"", "tests/test_a.py is not of the package"),
        ("equipoise/gone.py", b"", "equipoise/gone.py is not as in the tree"),
        (CORE, f"\0{FOLDER}/csrc\0".encode(), f"{CORE} says {FOLDER}/csrc"),
        (METADATA, b"Requires-Dist: torch>=2.10", "requires torch where no extra is named"),
    ],
)
def test_file_that_must_not_be_there_is_reported(
    wheel: dict[str, bytes], name: str, content: bytes, message: str
) -> None:
    assert list(faults({**wheel, name: content})) == [message]


def test_path_of_a_machine_in_text_is_reported(wheel: dict[str, bytes]) -> None:
    message = f"{METADATA} says {FOLDER.rpartition('/')[0]}"
    assert list(faults({**wheel, METADATA: wheel[METADATA] + FOLDER.encode()})) == [message]


def test_command_that_fails_is_a_fault_with_its_output() -> None:
    with pytest.raises(Fault, match=r"ended with 1:\nno$"):
        call(sys.executable, "-c", "raise SystemExit('no')")


def test_python_that_is_not_here_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EQUIPOISE_PYTHON311", sys.executable)
    monkeypatch.setenv("EQUIPOISE_PYTHON312", "python-of-nobody")
    assert interpreters() == {"3.11": sys.executable}
    assert capsys.readouterr().out == (
        "python-of-nobody is not here and is left out; EQUIPOISE_PYTHON312 may name it\n"
    )


def test_copy_has_tracked_files_and_links(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--error-unmatch", "setup.py"],
        cwd=check_wheels.ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("this tree is no clone")
    check_wheels.copy_tracked(tmp_path)
    assert (tmp_path / "setup.py").read_bytes() == (check_wheels.ROOT / "setup.py").read_bytes()
    assert (tmp_path / "src" / "equipoise" / "hal").is_symlink()
    assert list(tmp_path.rglob("*.so")) == []
