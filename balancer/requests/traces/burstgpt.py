"""Reads BurstGPT (github.com/HPMLL/BurstGPT, CC-BY-4.0).

CSV of which three columns are read: Timestamp, in seconds, Request tokens and Response tokens. The
others differ between releases. Requests that failed have no response tokens.
"""

from equipoise.balancer.requests.traces.csv_columns import read_columns
from equipoise.balancer.requests.traces.trace_file import TraceFile
from equipoise.balancer.requests.traces.workload_builder import WorkloadBuilder
from equipoise.balancer.requests.workload import Workload

COLUMNS = "Timestamp", "Request tokens", "Response tokens"


def read(source: TraceFile, most: int | None) -> Workload:
    """Reads the first `most` rows, or all. Raises `FormatError` that names the line."""
    builder = WorkloadBuilder(source)
    for times, prompts, outputs in read_columns(source, COLUMNS, most):
        builder.add(
            times.seconds_as_nanoseconds(), prompts.token_counts(1), outputs.token_counts(0)
        )
    return builder.workload()
