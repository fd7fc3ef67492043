"""What every benchmark writes beside its figures: command, commit, machine."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from equipoise.demo.machine import describe_machine

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """Short name of the commit that is measured, with `+` when the code differs from it."""
    name = _git("rev-parse", "--short", "HEAD")
    code = (".", ":!benchmarks/results", ":!docs", ":!*.md")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return name + ("+" if changed else "")


def save(name: str, command: list[str], figures: dict[str, Any]) -> Path:
    """Write `benchmarks/results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    return write(RESULTS / f"{name}.json", command, figures)


def write(path: Path, command: list[str], figures: dict[str, Any]) -> Path:
    """Write figures with what they were measured by; `path` again."""
    whole = {
        "command": shlex.join(command),
        "commit": commit(),
        "machine": describe_machine(),
        "figures": figures,
    }
    path.write_text(json.dumps(whole, indent=2) + "\n")
    told = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    sys.stderr.write(f"figures: {told}\n")
    return path


def source(found: dict[str, Any]) -> str:
    """One line that says where saved figures are from."""
    machine = found["machine"]
    return (
        f"`{found['command']}` at commit {found['commit']}, on {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory']}, Python {machine['python']}, "
        f"torch {machine['torch']}, numpy {machine['numpy']}."
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"
