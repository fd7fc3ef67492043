"""vllm-ascend without its hardware: stand-ins for what it imports, and its worker over gloo."""
