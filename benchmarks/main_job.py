"""Times the README's main job and keeps its figures: python benchmarks/main_job.py"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evidence import ROOT, save
from pictures import on_paper

from equipoise.demo.record import RunRecord
from equipoise.demo.record_file import load_record
from equipoise.report.heatmaps import rank_heat

PICTURE = ROOT / "docs" / "images" / "before-after.svg"


def draw(record: RunRecord) -> None:
    """The README's picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(on_paper(rank_heat(record).svg))


def main() -> int:
    """Run `equipoise run` with its defaults; exit as it does."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        began = time.perf_counter()
        run = ["equipoise", "run", "--out", folder, "--json", str(figures)]
        code = subprocess.run([sys.executable, "-m", *run], check=False).returncode
        seconds = time.perf_counter() - began
        if not figures.exists():
            return code
        draw(load_record(Path(folder) / "record.npz"))
        measured = {"wall_seconds": round(seconds, 1), **json.loads(figures.read_text())}
    save("main_job", ["equipoise", "run"], measured)
    return code


if __name__ == "__main__":
    sys.exit(main())
