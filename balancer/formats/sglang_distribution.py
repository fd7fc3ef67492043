"""Reads and writes `logical_count` of SGLang's expert distribution recorder, as .pt or JSON.

The array is (layers, experts) or (steps, layers, experts). The index of a layer is its number in
the model, so layers without experts are there as zeros; reading leaves them out. The recorder's
modes `stat` and `stat_approx` write this; `per_pass` and `per_token` write `records` of one rank by
slot, which are no statistics: `sglang_records` reads them as a routing trace.
"""

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.decoded_file import DecodedFile
from equipoise.balancer.formats.equipoise_files import counts_of
from equipoise.balancer.formats.statistics import ExpertStatistics

LOGICAL_COUNT = "logical_count"
RECORDS = "records"


def unpack(file: DecodedFile) -> ExpertStatistics:
    """Reads the counts of layers with experts. Raises `FormatError` and `PlacementError`."""
    return ExpertStatistics(counts_of(file, LOGICAL_COUNT)).without_empty_layers()


def refuse_records(file: DecodedFile) -> ExpertStatistics:
    """Raises `FormatError` that names the mode to record in."""
    what = "holds records by pass of one rank: record in mode stat, or replay them as a trace"
    raise file.error(what)


def pack(statistics: ExpertStatistics) -> dict[str, npt.NDArray[np.generic]]:
    """Returns counts with every layer at its number; layers that were not recorded are zeros."""
    windows, _, experts = statistics.counts.shape
    counts = np.zeros((windows, statistics.layers[-1] + 1, experts), dtype=np.int64)
    counts[:, list(statistics.layers)] = statistics.counts
    return {LOGICAL_COUNT: counts}
