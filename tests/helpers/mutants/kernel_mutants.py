"""Copies of the package of kernels with one thing broken: what a test must be able to see.

Triton reads the source of a kernel, so a mutant is source: a copy of the folder under a name of its
own, in which one text is replaced by another.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.harnesses.kernel_launchers import REAL, Launchers


@dataclass(frozen=True)
class Mutant:
    """One break.

    Attributes:
        name: what is wrong.
        file: of the package, without its ending.
        text: that is replaced where it stands, which is somewhere.
        by: what.
        check: by which it must be found.
    """

    name: str
    file: str
    text: str
    by: str
    check: str

    def make(self, folder: Path, patch: pytest.MonkeyPatch) -> Launchers:
        """Write the copy into `folder` and make it importable while `patch` lasts."""
        package = f"mutant_{self.name.replace(' ', '_')}"
        spec = find_spec(REAL)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
        (folder / package).mkdir()
        for path in source.glob("*.py"):
            code = path.read_text(encoding="utf-8")
            if path.stem == self.file:
                assert self.text in code, f"{self.file}: no {self.text!r} to break"
                code = code.replace(self.text, self.by)
            code = code.replace(REAL, package)
            (folder / package / path.name).write_text(code, encoding="utf-8")
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "dont_write_bytecode", True)
        return Launchers(package)


MUTANTS = (
    Mutant(
        "totals are left as they are",
        "histogram",
        'tl.atomic_xchg(totals + bins, tl.zeros_like(bins), mask=inside, sem="relaxed")',
        "tl.load(totals + bins, mask=inside)",
        "count",
    ),
    Mutant(
        "the ticket is not taken back", "histogram", "tl.store(totals + BINS, 0)", "pass", "count"
    ),
    Mutant(
        "the first program finishes",
        "histogram",
        "number == tl.num_programs(0) - 1",
        "number == 0",
        "count",
    ),
    Mutant(
        "padding is counted as the first expert",
        "hash_routing",
        "histogram = tl.histogram(expert, BINS, mask=inside)",
        "histogram = tl.histogram(tl.where(inside, expert, 0), BINS, mask=at < elements)",
        "hashed",
    ),
    Mutant(
        "padding goes to slot 0",
        "table_lookup",
        "mask=inside, other=SLOTS",
        "mask=inside, other=0",
        "hashed",
    ),
    Mutant("the idle set is read", "table_lookup", "(word & 1)", "((word + 1) & 1)", "hashed"),
    Mutant(
        "a draw at the end of a share stays", "table_lookup", "end <= draw", "end < draw", "edges"
    ),
    Mutant(
        "the last part of a run is not asked",
        "table_lookup",
        "tl.static_range(1, 4)",
        "tl.static_range(1, 3)",
        "runs",
    ),
    Mutant(
        "an element is earlier than itself",
        "occurrences",
        "(place < at[None, :])",
        "(place <= at[None, :])",
        "apportioned",
    ),
    Mutant(
        "blocks before are added up by halves",
        "quota_routing",
        "total += tl.sum(block_counts, 0)",
        "total = tl.sum(block_counts, 0)",
        "apportioned",
    ),
    Mutant("ranks round alike", "quota_routing", "- dither - 1", "- 1", "apportioned"),
    Mutant(
        "rings are not closed",
        "levelling",
        "((copies > 2) | (place == 0))",
        "(place < copies - 1)",
        "levelled",
    ),
    Mutant(
        "rows of earlier ranks are forgotten",
        "levelled_routing",
        "occurrence += tl.load(before + expert, mask=inside, other=0)",
        "pass",
        "levelled",
    ),
    Mutant(
        "levelled ranks round alike",
        "levelling",
        "mix32(expert, state)",
        "mix32(expert, first)",
        "levelled",
    ),
    Mutant(
        "no sweep in whole rows",
        "levelling",
        "second_source, 1, True",
        "second_source, 0, True",
        "levelled chain",
    ),
    Mutant(
        "one levelling sweep too few",
        "levelling",
        "second_source, SWEEPS, False",
        "second_source, SWEEPS - 1, False",
        "levelled chain",
    ),
    Mutant(
        "a load of a rank comes from its last pair",
        "levelling",
        "before < 0, tl.maximum(last, 0), before), before",
        "before < 0, tl.maximum(last, 0), tl.maximum(last, 0)), before",
        "levelled",
    ),
    Mutant(
        "the second replica keeps what it lacks",
        "levelling",
        "-gather(load, onward))",
        "-load)",
        "levelled",
    ),
    Mutant(
        "loads of a group are counted in 32 bits",
        "levelling",
        "tl.int64 if WIDE",
        "tl.int32 if WIDE",
        "levelled",
    ),
    Mutant(
        "turns go on from block to block",
        "engine_rules",
        "earlier + turns",
        "earlier",
        "turns",
    ),
    Mutant(
        "rows behind the batch are counted", "engine_rules", "& (token < tl.load(rows))", "", "rows"
    ),
    Mutant(
        "the live set is overwritten",
        "table_commit",
        "idle = (word & 1)",
        "idle = ((word + 1) & 1)",
        "commits",
    ),
    Mutant(
        "the word is written twice",
        "table_commit",
        "layer, word, sem",
        "layer, word + 1, sem",
        "commits",
    ),
    Mutant("words have no number", "checksums", "steps += onward", "steps += 0", "checksum"),
    Mutant(
        "the length is left out",
        "checksums",
        "rest + mix64((-1 - length).to(tl.uint64))",
        "rest",
        "checksum",
    ),
    Mutant(
        "sums are left as they are",
        "checksums",
        'tl.atomic_xchg(sums + buffer, tl.zeros_like(length), sem="relaxed")',
        "tl.load(sums + buffer)",
        "checksum",
    ),
    Mutant(
        "all experts are in the first wave",
        "share_solver_sweeps",
        "depth + 1, 0)",
        "1, 0)",
        "solver",
    ),
    Mutant(
        "a rank waits for none but the last",
        "share_solver_sweeps",
        "tl.where(has_link, wave, depth)",
        "tl.where(has_link, 1, depth)",
        "solver",
    ),
    Mutant(
        "the remainder goes to the highest ranks",
        "share_solver_sweeps",
        "(lower < rest)",
        "(width - 1 - lower < rest)",
        "solver",
    ),
    Mutant(
        "pairs lose the remainder", "share_solver_sweeps", "- level + first)", "- level)", "solver"
    ),
    Mutant("one sweep too few", "share_solver", "SWEEPS=SWEEPS,", "SWEEPS=SWEEPS - 1,", "sweeps"),
    Mutant(
        "replicas on one rank are two bins",
        "share_solver_fill",
        "(other != before)",
        "(other >= 0)",
        "solver",
    ),
    Mutant(
        "the first bin lacks the remainder",
        "share_solver_fill",
        "below == 0",
        "below == 1",
        "solver",
    ),
    Mutant(
        "rests tie by higher slots",
        "share_solver",
        "(other < place)",
        "(other > place)",
        "solver",
    ),
    Mutant(
        "rests compare without replicas",
        "share_solver",
        "own_rest = rest * with_it",
        "own_rest = rest * shared",
        "solver",
    ),
    Mutant(
        "solved shares are kept at any price",
        "share_solver",
        "worst(water, SOLVED, SPARE, LANES) >",
        "worst(water, EVEN, SPARE, LANES) >",
        "even",
    ),
    Mutant(
        "rank loads are left behind",
        "share_solver",
        "tl.static_range(4)",
        "tl.static_range(3)",
        "solver",
    ),
    Mutant(
        "links are left behind",
        "share_solver_sweeps",
        "tl.store(row, tl.zeros_like(link), mask=has_link)",
        "pass",
        "solver",
    ),
)
