"""Load balancing of requests over data-parallel ranks, in vLLM's core client."""
