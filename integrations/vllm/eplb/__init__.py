"""Expert balancing in vLLM's EPLB: our engine as its state, or our planner as its policy."""
