"""The names of the formats that are written, for help that must not wait for numpy."""

STATISTICS = "tensorrt-llm", "sglang", "npz", "npy", "csv"
PLACEMENTS = "equipoise", "tensorrt-llm", "vllm", "sglang", "vllm-ascend", "eplb-table", "npy"
