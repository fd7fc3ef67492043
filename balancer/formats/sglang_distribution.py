"""Counts of SGLang's expert distribution recorder: `logical_count` in a .pt file, or in JSON.

(layers, experts) or (steps, layers, experts). The index of a layer is its number in the model, so
layers without experts are there too, as zeros: they are left out as it is read. Of the recorder's
modes `stat` and `stat_approx` write this; `per_pass` and `per_token` write `records` of one rank by
slot, which are not read.
"""

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.decoded_file import DecodedFile
from equipoise.balancer.formats.equipoise_files import counts_of
from equipoise.balancer.formats.statistics import Statistics

LOGICAL_COUNT = "logical_count"
RECORDS = "records"


def unpack(bundle: DecodedFile) -> Statistics:
    """Raises `FormatError` and `PlacementError`."""
    return Statistics(counts_of(bundle, LOGICAL_COUNT)).without_empty_layers()


def refuse_records(bundle: DecodedFile) -> Statistics:
    """Raises `FormatError` that says which mode to record in."""
    raise bundle.error("holds records by pass of one rank: record in mode stat instead")


def pack(statistics: Statistics) -> dict[str, npt.NDArray[np.generic]]:
    """Every layer at its number; those that were not recorded are zeros."""
    windows, _, experts = statistics.counts.shape
    counts = np.zeros((windows, statistics.layers[-1] + 1, experts), dtype=np.int64)
    counts[:, list(statistics.layers)] = statistics.counts
    return {LOGICAL_COUNT: counts}
