"""Names of the formats that can be written, for help texts, which must not wait for numpy."""

STATISTICS_FORMAT_NAMES = "tensorrt-llm", "sglang", "npz", "npy", "csv"
FOLDER_FORMAT_NAME = "tensorrt-llm"
"""The statistics format that is a folder with a file per rank."""
PLACEMENT_FORMAT_NAMES = (
    "equipoise",
    "tensorrt-llm",
    "vllm",
    "sglang",
    "vllm-ascend",
    "eplb-table",
    "npy",
)
VLLM_ROUTED, SGLANG_ROUTED = "vllm-routed", "sglang-routed"
ROUTED_FORMAT_NAMES = VLLM_ROUTED, SGLANG_ROUTED
"""The routing traces that can be written: the experts of every token."""
SGLANG_RECORDS, MOE_TRACE, COUNTS = "sglang-records", "moe-trace", "counts"
TRACE_FORMAT_NAMES = *ROUTED_FORMAT_NAMES, SGLANG_RECORDS, MOE_TRACE, COUNTS
