"""What vLLM's own EPLB needs on a CPU, and nobody else."""
