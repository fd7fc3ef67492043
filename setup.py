"""Build of the native core. Everything else about the package stands in pyproject.toml."""

import shutil
from importlib.metadata import distribution
from pathlib import Path

import nanobind
from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

NANOBIND = Path(nanobind.__file__).parent
NANOBIND_FOLDERS = ("include", "src", "ext/robin_map/include")
PARTS = ("hal", "backends", "balancer", "pipeline", "integrations")
FLAGS = [
    *("-std=c++17", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing"),
    # Contraction would make the planner's scores differ between processors.
    "-ffp-contract=off",
    # Python asks for debug information: sixteen times the size, and paths of this machine.
    "-g0",
]


class CleanBuild(build_py):
    """Copies anew: modules that were deleted since an earlier build would stay in the wheel."""

    def run(self) -> None:
        """Remove what was copied before; add the licences of what the native core contains."""
        package = Path(self.build_lib) / "equipoise"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            folder = package / "licenses"
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in compiled_in_licences().items():
                (folder / name).write_text(text, "utf-8")


def compiled_in_licences() -> dict[str, str]:
    """Licences that whoever passes on a binary of nanobind and of its hash map has to pass on."""
    nanobind_files = distribution("nanobind").files or []
    [licence] = (file for file in nanobind_files if file.name == "LICENSE")
    header = (NANOBIND / "ext/robin_map/include/tsl/robin_map.h").read_text("utf-8")
    return {
        "nanobind.txt": licence.read_text("utf-8"),
        "robin_map.txt": header.partition("*/")[0] + "*/\n",
    }


packages = find_packages("src")
if not {f"equipoise.{part}" for part in PARTS} <= set(packages):
    raise SystemExit(
        "src/equipoise/* must be symlinks to ../../*: run `git config core.symlinks true` "
        "and check the files out again"
    )

setup(
    package_dir={"": "src"},
    packages=packages,
    cmdclass={"build_py": CleanBuild},
    ext_modules=[
        Extension(
            "equipoise._native",
            sorted(str(source) for source in Path("csrc").rglob("*.cpp")),
            depends=sorted(str(header) for header in Path("csrc").rglob("*.h")),
            include_dirs=["csrc", *(str(NANOBIND / d) for d in NANOBIND_FOLDERS)],
            extra_compile_args=FLAGS,
            language="c++",
        )
    ],
)
