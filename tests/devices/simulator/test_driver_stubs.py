"""What torch_npu needs at load, and the alarm when that changes."""

from pathlib import Path

import pytest
from npusim import stubs
from npusim.errors import Refused
from npusim.wheels import find_torch, find_torch_npu

LISTING = "# 2 functions that torch_npu 1.0 needs from CANN at load.\naclA\naclB\n"


def test_stubs_check_accepts_committed_set_for_any_version() -> None:
    stubs.check(LISTING, "1.1", {"aclB", "aclA"})
    assert stubs.listing("1.0", {"aclB", "aclA"}) == LISTING


def test_stubs_check_names_added_and_removed_functions() -> None:
    with pytest.raises(Refused) as error:
        stubs.check(LISTING, "1.1", {"aclA", "aclC"})
    lines = str(error.value).splitlines()
    assert "torch_npu 1.1 needs other functions" in lines[0]
    assert "torch_npu 1.0" in lines[0]
    assert lines[1:3] == ["  added:   aclC", "  removed: aclB"]
    assert "--update" in lines[3]


def test_stubs_check_refuses_empty_listing() -> None:
    with pytest.raises(Refused, match="added:   aclA"):
        stubs.check("", "1.0", {"aclA"})


def test_stubs_write_puts_function_into_its_library(tmp_path: Path) -> None:
    stubs.write(tmp_path, {"aclA", "rtB", "HcclC"})
    ascendcl, hccl = ((tmp_path / f"{name}.cpp").read_text() for name in ("ascendcl", "hccl"))
    assert "long aclA()" in ascendcl
    assert "long rtB()" in ascendcl
    assert "libhccl: HcclC was called and is a stub" in hccl
    assert "HcclC" not in ascendcl


@pytest.mark.deep
def test_stubs_listing_matches_installed_torch_npu() -> None:
    torch_npu = find_torch_npu()
    symbols = stubs.required(find_torch(), torch_npu)
    assert stubs.listing(torch_npu.version, symbols) == stubs.COMMITTED.read_text(encoding="utf-8")
    assert {"aclInit", "aclrtMemcpyAsync", "rtKernelLaunch"} <= symbols
    assert not {name for name in symbols if name.startswith(("_Z", "pthread", "Py"))}
