"""Reads Azure's traces of LLM inference of 2023 and 2024.

Source: github.com/Azure/AzurePublicDataset, CC-BY-4.0. CSV with the columns TIMESTAMP,
ContextTokens and GeneratedTokens. Times of 2023 have seven decimals; those of 2024 may have a zone,
and leave out a fraction of zero.
"""

from equipoise.balancer.requests.traces.csv_columns import parse_timestamps, read_columns
from equipoise.balancer.requests.traces.trace_file import TraceFile
from equipoise.balancer.requests.traces.workload_builder import WorkloadBuilder
from equipoise.balancer.requests.workload import Workload

COLUMNS = "TIMESTAMP", "ContextTokens", "GeneratedTokens"


def read(source: TraceFile, most: int | None) -> Workload:
    """Reads the first `most` rows, or all. Raises `FormatError` that names the line."""
    builder = WorkloadBuilder(source)
    for times, prompts, outputs in read_columns(source, COLUMNS, most):
        builder.add(parse_timestamps(times), prompts.token_counts(1), outputs.token_counts(0))
    return builder.workload()
