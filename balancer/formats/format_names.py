"""The names of the formats that are written, for help that must not wait for numpy."""

STATISTICS_FORMAT_NAMES = "tensorrt-llm", "sglang", "npz", "npy", "csv"
FOLDER_FORMAT_NAME = "tensorrt-llm"
"""The one of statistics that is a folder, with a file for each rank."""
PLACEMENT_FORMAT_NAMES = (
    "equipoise",
    "tensorrt-llm",
    "vllm",
    "sglang",
    "vllm-ascend",
    "eplb-table",
    "npy",
)
