"""Executors: play the cases of properties on a schedule, on a device, on rank processes."""
