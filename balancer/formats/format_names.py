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
