"""Every kernel is launched once before it is needed, and nothing is the worse for it."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from helpers.harnesses.kernel_launchers import REAL, Launchers, is_clean
from helpers.harnesses.triton_interpreter import DEVICE

from equipoise.backends.cuda.kernels import warmup
from equipoise.hal.kernels import Tables

pytestmark = pytest.mark.slow

KERNELS = Launchers(REAL)


@pytest.mark.parametrize("elements", [0, 5000])
def test_warm_leaves_tables_and_workspace_unchanged(elements: int) -> None:
    tables = Tables.empty(2, 3, 4, 2, DEVICE)
    tables.generation.fill_(5)
    workspace = KERNELS.workspace(3, 4, 2, elements)
    warmup.warm(tables, workspace)
    assert is_clean(workspace)
    assert tables.generation.tolist() == [5, 5]
    assert not any(bool(part.any()) for part in (tables.start, tables.cumulative))


def test_warm_launches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    names_launched = set[str]()

    def record_launch(name: str) -> object:
        return lambda *args: names_launched.add(name)

    names = {"commit_tables", "count", "route_hashed", "route_apportioned", "route_by_rule"}
    names |= {"route_levelled", "solve_shares", "checksum"}
    for name in names:
        monkeypatch.setattr(warmup, name, record_launch(name))
    warmup.warm(Tables.empty(1, 2, 2, 1, DEVICE), KERNELS.workspace(2, 2, 1, 10))
    assert names_launched == names
