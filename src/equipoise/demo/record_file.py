"""A run's record as a file: arrays and one JSON text in an uncompressed archive, no pickle."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from equipoise.balancer.observe.spans import Level, Traced
from equipoise.demo.record import Epoch, RunRecord, VariantRecord
from equipoise.hal.errors import UsageError

ARRAYS = ("step_tokens", "expert_rows")
VARIANT_ARRAYS = ("rank_rows", "step_seconds")


def save_record(record: RunRecord, path: Path) -> None:
    """Write `record`; the file's name ends in .npz."""
    facts = asdict(record)
    arrays = {name: facts.pop(name) for name in ARRAYS}
    for variant, fields in facts["variants"].items():
        for name in VARIANT_ARRAYS:
            arrays[f"{variant}.{name}"] = fields.pop(name)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, record=np.array(json.dumps(facts)), **arrays)


def load_record(path: Path) -> RunRecord:
    """Read what `save_record` wrote. Raises `UsageError` for anything else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            stored = {name: archive[name] for name in archive.files}
        facts = json.loads(str(stored.pop("record")))
        return _restore(facts, stored)
    except (OSError, EOFError, BadZipFile, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not the record of a run: {error}") from error


def _restore(facts: dict[str, Any], arrays: dict[str, Any]) -> RunRecord:
    variants = {
        name: VariantRecord(
            **{key: arrays[f"{name}.{key}"] for key in VARIANT_ARRAYS},
            **{**fields, "epochs": tuple(Epoch(**epoch) for epoch in fields["epochs"])},
        )
        for name, fields in facts.pop("variants").items()
    }
    tuples: dict[str, Any] = {
        key: tuple(facts.pop(key)) for key in ("phases", "switch_steps", "prompts", "continuations")
    }
    # Runs that were recorded before spans were have none.
    tuples["spans"] = tuple(Traced(**span) for span in facts.pop("spans", ()))
    tuples["levels"] = tuple(Level(**level) for level in facts.pop("levels", ()))
    return RunRecord(
        variants=variants, **tuples, **{name: arrays[name] for name in ARRAYS}, **facts
    )
