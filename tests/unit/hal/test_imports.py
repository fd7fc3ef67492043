"""Clause R4: importing touches no vendor, no device, and starts no thread."""

import json
import pkgutil
import subprocess
import sys

import pytest

import equipoise

pytestmark = pytest.mark.slow

VENDORS = ("torch_npu", "cuda", "triton", "vllm", "vllm_ascend", "mpi4py", "matplotlib", "cupy")
WITHIN_ENGINES = {
    "equipoise.integrations.ray.router": "ray",
    **{
        f"equipoise.integrations.vllm.{name}": "vllm"
        for name in ("eplb.layer_state", "eplb.state", "eplb.policy")
    },
}
"""They derive from an engine's classes: what imports them has seen that it is there."""
LOOK = """
import json, sys, threading
{body}
import os
tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
print(json.dumps([sorted({{name.partition(".")[0] for name in sys.modules}}),
                  threading.active_count(), tasks]))
"""


def state_after(body: str) -> tuple[set[str], int, int]:
    """Top-level modules, Python threads and threads of the system after `body`."""
    result = subprocess.run(
        [sys.executable, "-c", LOOK.format(body=body)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    modules, threads, tasks = json.loads(result.stdout.splitlines()[-1])
    return set(modules), threads, tasks


def public_modules() -> list[str]:
    walk = pkgutil.walk_packages(equipoise.__path__, "equipoise.")
    return [m.name for m in walk if not m.name.rpartition(".")[2].startswith("__")]


def test_package_import_loads_neither_vendor_nor_torch() -> None:
    modules, threads, tasks = state_after("import equipoise")
    assert not modules & {*VENDORS, "torch", "numpy"}
    assert (threads, tasks) == (1, 1)


def test_cli_parsing_loads_neither_vendor_nor_torch() -> None:
    body = "from equipoise.cli import main, parser\nparser.build_parser().parse_args(['doctor'])"
    modules, threads, tasks = state_after(body)
    assert not modules & {*VENDORS, "torch", "numpy"}
    assert (threads, tasks) == (1, 1)


def test_public_modules_import_without_vendor_or_thread() -> None:
    names = sorted({*public_modules()} - WITHIN_ENGINES.keys())
    assert {"equipoise.hal.stream", "equipoise.backends.cpu", "equipoise.pipeline"} <= set(names)
    body = "import torch\nbefore = threading.active_count()\nimport numpy\n"
    body += "\n".join(f"import {name}" for name in names)
    body += "\nassert threading.active_count() == before\nassert not torch.cuda.is_initialized()"
    modules, threads, _ = state_after(body)
    assert not modules & {"torch_npu", "vllm", "vllm_ascend", "ray", "mpi4py", "matplotlib", "cupy"}
    assert threads == 1


@pytest.mark.parametrize("name", sorted(WITHIN_ENGINES))
def test_modules_within_an_engine_fail_only_where_it_is_missing(name: str) -> None:
    assert name in public_modules()
    without = f"import sys\nsys.modules['{WITHIN_ENGINES[name]}'] = None\nimport {name}"
    result = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, timeout=240, check=False
    )
    missing = f"ModuleNotFoundError: No module named '{WITHIN_ENGINES[name]}."
    assert result.stderr.splitlines()[-1].startswith(missing)
