"""Build of the native core. Everything else about the package stands in pyproject.toml."""

import shutil
from pathlib import Path

import nanobind
from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

NANOBIND = Path(nanobind.__file__).parent
NANOBIND_FOLDERS = ("include", "src", "ext/robin_map/include")
PARTS = ("hal", "backends", "balancer", "pipeline", "integrations")
# Contraction would make the planner's scores differ between processors.
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off"]


class CleanBuild(build_py):
    """Copies anew: modules that were deleted since an earlier build would stay in the wheel."""

    def run(self) -> None:
        """Remove what was copied before."""
        shutil.rmtree(Path(self.build_lib) / "equipoise", ignore_errors=True)
        super().run()


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
