"""The names of the formats that are written, for help that must not wait for numpy."""

STATISTICS = "tensorrt-llm", "sglang", "npz", "npy", "csv"
IN_A_FOLDER = "tensorrt-llm"
"""The one of statistics that is a folder, with a file for each rank."""
PLACEMENTS = "equipoise", "tensorrt-llm", "vllm", "sglang", "vllm-ascend", "eplb-table", "npy"
