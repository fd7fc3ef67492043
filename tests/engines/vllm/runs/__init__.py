"""Runs of a real vLLM on a CPU: models, reference tokens, and processes under a watchdog."""
