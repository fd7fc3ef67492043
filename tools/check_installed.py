"""Whether the installed package is the one in this tree: tests of an older one would prove nothing.

Run by the interpreter that is asked about: `.tox/build/bin/python tools/check_installed.py`. Exit
code 1, and one line that says what to do, where it is not.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "equipoise"


def modules(folder: Path) -> dict[str, bytes]:
    """Content of every module below `folder`, by path; links are followed."""
    contents: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            inner = modules(path)
            contents.update({f"{path.name}/{name}": content for name, content in inner.items()})
        elif path.suffix == ".py":
            contents[path.name] = path.read_bytes()
    return contents


def differences(installed: Path) -> Iterator[str]:
    """What differs between the tree and an installed copy, by path."""
    if installed.samefile(PACKAGE):
        return  # an editable install
    ours, theirs = modules(PACKAGE), modules(installed)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield name
    build_time = max(path.stat().st_mtime for path in installed.glob("_native*"))
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        if path.stat().st_mtime > build_time:
            yield path.relative_to(ROOT).as_posix()


def main() -> int:
    """The command."""
    spec = find_spec("equipoise")
    if spec is None or spec.origin is None:
        print(f"{sys.executable} has no equipoise: tox makes the environment", file=sys.stderr)
        return 1
    differing = list(differences(Path(spec.origin).parent))
    if not differing:
        return 0
    environment = Path(sys.prefix).name
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    print(
        f"{sys.prefix} holds an older equipoise ({differing[0]}{more}): "
        f"run `tox -e {environment}` first",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
