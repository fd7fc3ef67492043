"""The file into which every process under the simulator writes what no correct program causes."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

VARIABLE = "NPUSIM_FAULTS"
SHOWN = 50
"""Different faults that are printed in full."""
PROCESS = re.compile(r"^npusim fault: \[\d+\] ")


@contextmanager
def fault_file() -> Iterator[Path]:
    """An empty file for the time of one command."""
    with TemporaryDirectory(prefix="npusim-") as folder:
        path = Path(folder) / "faults"
        path.touch()
        yield path


def read(path: Path) -> Counter[str]:
    """How often each fault was told, without the numbers of the processes."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return Counter(PROCESS.sub("", line) for line in lines if line)


def summary(faults: Counter[str]) -> str:
    """The faults, most frequent first, for people."""
    lines = [f"npusim: {faults.total()} faults, {len(faults)} different"]
    lines += [f"  {count:5} x {what}" for what, count in faults.most_common(SHOWN)]
    if len(faults) > SHOWN:
        lines.append(f"  and {len(faults) - SHOWN} more")
    return "\n".join(lines)
