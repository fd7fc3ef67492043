"""The public names, against a list that is written here: to add or remove one takes two edits."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from inspect import getdoc

import pytest
from helpers.paths import ROOT

import equipoise

NAMES = [
    "Assignment",
    "AsyncIntermediateTensors",
    "BalancerConfig",
    "Capacity",
    "Connection",
    "Decision",
    "EquipoiseError",
    "ExpertPlacement",
    "ExpertShape",
    "ExpertStatistics",
    "ModelBalancer",
    "ModelRegistry",
    "Plan",
    "PlannerOptions",
    "Request",
    "RequestRouter",
    "RoutingPolicy",
    "RoutingPolicySettings",
    "ShareMode",
    "TensorChannel",
    "VariableSizeExchange",
    "WorkerChange",
    "WorkerReport",
    "WorkerState",
    "check_backend",
    "connect",
    "events",
    "initial_placement",
    "open_balancer",
    "plan",
    "read_placement",
    "read_statistics",
    "write_placement",
    "write_statistics",
]


def test_public_names_are_those_of_written_list() -> None:
    assert equipoise.__all__ == NAMES


def test_dir_lists_public_names() -> None:
    assert set(dir(equipoise)) == {*NAMES, "__version__"}


@pytest.mark.parametrize("name", NAMES)
def test_public_name_resolves_to_documented_object_of_its_module(name: str) -> None:
    target = getattr(equipoise, name)
    assert len((getdoc(target) or "").splitlines()[0]) > 20
    home = getattr(target, "__module__", None)
    assert target is (getattr(import_module(home), name) if home else sys.modules[target.__name__])


def test_type_checkers_see_every_public_name_where_it_is_imported_from() -> None:
    tree = ast.parse((ROOT / "src" / "equipoise" / "__init__.py").read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    paths: dict[str | None, str] = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        paths |= {alias.asname: f"{statement.module}.{alias.name}" for alias in statement.names}
    assert sorted(filter(None, paths)) == NAMES
    for name, path in paths.items():
        module, _, attribute = path.rpartition(".")
        assert getattr(import_module(module), attribute) is getattr(equipoise, str(name))


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("open_balancers", "open_balancer"), ("Conection", "Connection"), ("plans", "plan")],
)
def test_misspelt_name_raises_attribute_error_with_nearest(typo: str, nearest: str) -> None:
    with pytest.raises(
        AttributeError, match=f"has no attribute '{typo}'; did you mean '{nearest}'"
    ):
        getattr(equipoise, typo)


def test_unlike_name_raises_attribute_error_without_guess() -> None:
    with pytest.raises(AttributeError) as error:
        equipoise.zzz  # noqa: B018
    assert str(error.value) == "module 'equipoise' has no attribute 'zzz'"


@pytest.mark.parametrize("page", ["docs/api.md"])
def test_reference_page_has_every_public_name_once(page: str) -> None:
    names = re.findall(r"^::: equipoise\.(\w+)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert sorted(names) == NAMES


def test_design_page_names_every_public_name() -> None:
    page = (ROOT / "docs" / "design" / "api.md").read_text("utf-8")
    section = page.partition("## The names")[2].partition("## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == NAMES


@pytest.mark.slow
def test_planning_and_routing_of_requests_need_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import equipoise
assert "numpy" not in sys.modules
print(equipoise.plan([[4, 1, 1, 1]], slots=6, ranks=2).moves)
router = equipoise.RequestRouter(equipoise.RoutingPolicySettings(), [equipoise.Capacity(slots=1)])
print(router.on_arrival(equipoise.Request(id="a", size=3)).assignments[0].worker)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.stdout, result.stderr) == ("6\n0\n", "")


def test_members_of_api_page_exist() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^::: equipoise\.(\w+)\n    options:\n((?:      .*\n)+)", page, re.MULTILINE
    )
    members = {name: re.findall(r"^        - (\w+)$", text, re.MULTILINE) for name, text in blocks}
    assert len(members["ModelBalancer"]) > 5
    missing = [
        f"{name}.{member}"
        for name, listed in members.items()
        for member in listed
        if not hasattr(getattr(equipoise, name), member)
    ]
    assert missing == []
