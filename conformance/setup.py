"""Build of `equipoise-conformance`: the part of the package that the suite needs, in Python alone.

The modules are those of `../src/equipoise`, under their names, so that a backend needs no change.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SOURCE = Path("..", "src")
WHOLE = (
    "hal",
    "backends.common",
    "backends.cpu",
    "backends.c10d",
    "backends.torchcomms",
    "backends.torch_accelerator",
    "integrations.expert_parallel",
)
"""Packages that are included whole, with what is below them, where they exist."""
PARTS = {
    "equipoise": ("__init__", "input_files", "machine", "option"),
    "equipoise.backends": ("__init__",),
    "equipoise.cli": (
        "__init__",
        "command",
        "option_checks",
        "conformance",
        "conformance_command",
        "conformance_options",
        "exit_code",
        "files",
        "import_errors",
        "process",
    ),
    "equipoise.integrations": ("__init__",),
    "equipoise.report": ("__init__", "conformance", "page", "terminal"),
}
"""Packages of which only these modules are included."""
NATIVE = {"equipoise.backends.cpu": ("accelerator", "kernels", "slots")}
"""Modules that need the native core, which is not included."""
GROUPS = (
    "equipoise.accelerator_families",
    "equipoise.communicators",
    "equipoise.communicator_families",
    "equipoise.expert_parallel",
)
"""Entry points of which those are included whose modules are."""


class BuildPart(build_py):
    """Copies the modules of the suite, anew each time."""

    def run(self) -> None:
        """Remove what an earlier build copied."""
        shutil.rmtree(Path(self.build_lib) / "equipoise", ignore_errors=True)
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package, without those that are left out."""
        modules = super().find_package_modules(package, package_dir)
        names = PARTS.get(package)
        return [
            module
            for module in modules
            if (names is None or module[1] in names) and module[1] not in NATIVE.get(package, ())
        ]


def packages() -> list[str]:
    """Every package of which something is included."""
    whole = tuple(f"equipoise.{name}" for name in WHOLE)
    return [
        name
        for name in find_packages(str(SOURCE))
        if name in PARTS or name in whole or name.startswith(tuple(f"{w}." for w in whole))
    ]


def is_included(module: str, included: list[str]) -> bool:
    """Whether a module or package is in the wheel."""
    parent = module.rpartition(".")[0]
    return module in included or (parent in included and parent not in PARTS)


def entry_points(included: list[str]) -> dict[str, list[str]]:
    """The command, the host, and those backends of the package whose modules are included."""
    project = tomllib.loads(Path("..", "pyproject.toml").read_text("utf-8"))["project"]
    groups = {
        group: [
            f"{name} = {place}"
            for name, place in project["entry-points"].get(group, {}).items()
            if is_included(place.partition(":")[0], included)
        ]
        for group in GROUPS
    }
    return {
        "console_scripts": ["equipoise-conformance = equipoise.cli.conformance_command:main"],
        "equipoise.accelerators": ["host = equipoise.backends.cpu.host:HOST"],
        **groups,
    }


def version() -> str:
    """The version of the package."""
    text = (SOURCE / "equipoise" / "__init__.py").read_text("utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


if not (SOURCE / "equipoise" / "hal" / "__init__.py").is_file():
    raise SystemExit(
        "../src/equipoise/hal must be a link to ../../hal: run `git config core.symlinks true` and "
        "check the files out again"
    )

setup(
    version=version(),
    package_dir={"": str(SOURCE)},
    packages=packages(),
    entry_points=entry_points(packages()),
    # Only what the next lines name: setuptools else takes a folder of data for a package left out.
    include_package_data=False,
    package_data={
        "equipoise": ["py.typed"],
        "equipoise.report": [
            f"templates/{name}"
            for name in ("base.html", "conformance.html", "parts.html", "style.css")
        ],
    },
    # Of the native core, which is not included.
    exclude_package_data={"equipoise": ["_native.pyi"]},
    cmdclass={"build_py": BuildPart},
    # Here, and not beside the sources: there it would be found as an installed distribution.
    options={"egg_info": {"egg_base": "."}},
)
