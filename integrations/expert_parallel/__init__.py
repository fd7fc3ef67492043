"""Expert-parallel libraries of vendors, for the conformance suite; see `hal/expert_parallel.py`."""
