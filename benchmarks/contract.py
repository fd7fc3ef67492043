"""Runs the conformance suite on every backend of ours, and every property on every mutant.

    python benchmarks/contract.py backends     a quarter of an hour
    python benchmarks/contract.py mutants      about as long
    python benchmarks/contract.py new          what the last results of mutants lack: a minute or so
    python benchmarks/contract.py seeds        five minutes
    python benchmarks/contract.py faults       five minutes

Writes benchmarks/results/{contract,mutants,seeds,faults}.json, of which
`python benchmarks/contract_page.py` makes docs/conformance-matrix.md.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from evidence import RESULTS, ROOT, save

sys.path.insert(0, str(ROOT / "tests"))
PROFILES = "equipoise.backends.virtual.profiles"
THIRD_PARTY = ROOT / "examples" / "third_party_backend"
CASES = 200
"""Of the property that is to reject a mutant."""
OTHERS = 40
"""Of every other property: whether it cannot help rejecting the mutant as well."""
SEED = 1
SEEDS, VIRTUAL_FAULTS, PROCESS_FAULTS, RANKS = 20, 1000, 200, 4


def runs() -> dict[str, list[str]]:
    """What is run, by the name of its column."""
    from equipoise.backends.virtual import profiles

    quirky = {name: f"{PROFILES}:{name.upper().replace('-', '_')}" for name in profiles.PROFILES}
    ours = [sys.executable, "-m", "equipoise", "conformance", "--quiet", "--backend"]
    mpiexec = shutil.which("mpiexec") or "mpiexec"
    return {
        "virtual": [*ours, "virtual"],
        **{f"virtual, {name}": [*ours, backend] for name, backend in quirky.items()},
        "cpu, gloo": [*ours, "cpu", "--ranks", "8"],
        "cpu, mpi": [mpiexec, "-n", "4", *ours, "cpu", "--communicator", "mpi"],
        "third party": [*ours, "equipoise_inline:BACKEND", "--ranks", "4"],
    }


def measure(command: list[str]) -> dict[str, Any]:
    """One run's verdicts. Raises RuntimeError when the suite could not run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "verdicts.json"
        paths = [str(THIRD_PARTY), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [*command, "--json", str(out)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if not out.exists():
            raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr}")
        verdicts: dict[str, Any] = json.loads(out.read_text())
    return verdicts


def backends() -> None:
    """The suite on every backend of ours."""
    figures = {}
    for name, command in runs().items():
        verdicts = measure(command)
        figures[name] = {
            "command": shlex.join(["equipoise", *command[command.index("conformance") :]]),
            "seconds": verdicts["seconds"],
            "clauses": {clause: found["status"] for clause, found in verdicts["clauses"].items()},
        }
        sys.stderr.write(f"{name}: exit code {verdicts['exit_code']}, {verdicts['seconds']} s\n")
    save("contract", ["python", "benchmarks/contract.py", "backends"], figures)


def mutants() -> None:
    """Every property on every mutant; a process a core."""
    from conformance.mutants.collection import mutants as collect

    names = [mutant.name for mutant in collect()]
    with ProcessPoolExecutor() as pool:
        rows = dict(_told(zip(names, pool.map(verdicts, names), strict=True)))
    save("mutants", ["python", "benchmarks/contract.py", "mutants"], _matrix(rows))


def new() -> None:
    """New mutants on every property, and every mutant on new properties; the rest stays."""
    from conformance.mutants.collection import mutants as collect

    from equipoise.hal.conformance import suite

    kept = json.loads((RESULTS / "mutants.json").read_text())["figures"]
    known = {claim["name"] for claim in kept["properties"]}
    fresh = [claim.name for claim in suite.properties() if claim.name not in known]
    old = [m.name for m in collect() if m.name in kept["mutants"]]
    born = [m.name for m in collect() if m.name not in kept["mutants"]]
    with ProcessPoolExecutor() as pool:
        rejecting = dict(zip(old, pool.map(rejected_by, old, [fresh] * len(old)), strict=True))
        rows = dict(_told(zip(born, pool.map(verdicts, born), strict=True)))
    for name in old:
        row = kept["mutants"][name]
        row["rejected_by"] = [c for c in row["rejected_by"] if c not in fresh] + rejecting[name]
    whole = {m.name: kept["mutants"].get(m.name) or rows[m.name] for m in collect()}
    save("mutants", ["python", "benchmarks/contract.py", "new"], _matrix(whole))


def _matrix(rows: dict[str, Any]) -> dict[str, Any]:
    from equipoise.hal.conformance import suite

    claims = [
        {"name": claim.name, "family": claim.family, "clauses": list(claim.clauses)}
        for claim in suite.properties()
    ]
    return {"cases": CASES, "others": OTHERS, "properties": claims, "mutants": rows}


def seeds() -> None:
    """No false alarm on the healthy virtual backend, whatever the draws start from."""
    with ProcessPoolExecutor() as pool:
        alarms = [alarm for found in pool.map(_alarms, range(SEEDS)) for alarm in found]
    figures = {"seeds": SEEDS, "alarms": alarms}
    save("seeds", ["python", "benchmarks/contract.py", "seeds"], figures)


def faults() -> None:
    """Many faults, on the virtual network and on processes."""
    from equipoise.backends.virtual import BACKEND
    from equipoise.hal.conformance.faults import FAULTS
    from equipoise.hal.conformance.processes import ProcessSubject
    from equipoise.hal.conformance.search import Effort, search
    from equipoise.hal.conformance.virtual import ControlledSubject

    virtual = search(FAULTS, ControlledSubject(BACKEND), Effort(cases=VIRTUAL_FAULTS))
    with closing(ProcessSubject("cpu", "gloo", RANKS)) as subject:
        processes = search(FAULTS, subject, Effort(cases=PROCESS_FAULTS))
    figures = {"virtual_faults": str(virtual), "process_faults": str(processes)}
    save("faults", ["python", "benchmarks/contract.py", "faults"], figures)


def _alarms(seed: int) -> list[str]:
    """What the suite finds wrong with the healthy virtual backend, from this seed."""
    from equipoise.cli.conformance_progress import Silence
    from equipoise.hal.conformance.campaign import Campaign
    from equipoise.hal.conformance.clauses import FAMILIES
    from equipoise.hal.conformance.profile import Profile
    from equipoise.report.clauses import violations

    campaign = Campaign(
        backend="virtual",
        communicator="virtual",
        ranks=1,
        profile=Profile.CI,
        families=FAMILIES,
        seed=seed,
    )
    result = campaign.run(Silence())
    if result is None:
        raise RuntimeError("a launcher has started this: run it by itself")
    sys.stderr.write(f"seed {seed}: exit code {result.exit_code}, {result.seconds:.0f} s\n")
    return [f"seed {seed}: {finding.claim}" for finding in violations(result)]


def verdicts(name: str) -> dict[str, Any]:
    """Which properties reject the mutant of that name, and how far its own shrinks."""
    from conformance.mutants.collection import mutants as collect

    from equipoise.hal.conformance import suite
    from equipoise.hal.conformance.search import Effort, Violated, search

    mutant = next(mutant for mutant in collect() if mutant.name == name)
    found = search(suite.find(mutant.property), mutant.subject(), Effort(cases=CASES, seed=SEED))
    others = [claim.name for claim in suite.properties() if claim.name != mutant.property]
    rejecting = rejected_by(name, others)
    told = {
        "clause": mutant.clause,
        "broken": mutant.broken,
        "property": mutant.property,
        "rejected_by": ([mutant.property] if isinstance(found, Violated) else []) + rejecting,
    }
    if isinstance(found, Violated):
        program = found.case.program
        told |= {"steps": len(program.steps), "program": program.lines(), "says": found.what}
        told["schedule"] = f"schedule {found.case.schedule.hex(' ')}"
    return told


def rejected_by(name: str, claims: list[str]) -> list[str]:
    """Which of these properties reject the mutant of that name."""
    from conformance.mutants.collection import mutants as collect

    from equipoise.hal.conformance import suite
    from equipoise.hal.conformance.search import Effort, Violated, search

    mutant = next(mutant for mutant in collect() if mutant.name == name)
    quick = Effort(cases=OTHERS, seed=SEED, shrinking=0)
    found = {claim: search(suite.find(claim), mutant.subject(), quick) for claim in claims}
    return [claim for claim, verdict in found.items() if isinstance(verdict, Violated)]


def _told(rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, row in rows:
        sys.stderr.write(f"{name}: rejected by {', '.join(row['rejected_by'])}\n")
        yield name, row


def main() -> None:
    """Do what the command line says."""
    jobs = {
        "backends": backends,
        "mutants": mutants,
        "new": new,
        "seeds": seeds,
        "faults": faults,
    }
    if len(sys.argv) != 2 or sys.argv[1] not in jobs:
        sys.exit(f"usage: python benchmarks/contract.py {'|'.join(jobs)}")
    jobs[sys.argv[1]]()


if __name__ == "__main__":
    main()
