"""Jobs, workers and events of the engine."""
