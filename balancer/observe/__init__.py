"""What becomes of an engine's entries: log lines, metrics, traces."""
