"""Parts of `gpu_speed.py`."""
