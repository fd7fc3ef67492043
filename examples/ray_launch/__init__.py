"""The parts of `ray_workers.py`; they import nothing that other nodes may not have."""
