"""A simulated CANN driver under the real torch_npu, for machines without an NPU: tests only."""
