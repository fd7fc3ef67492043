"""Constants of shares and of their water-filling, importable without torch.

The planner, the simulator and the proxy need them and run where torch is not installed;
`hal/routing.py` says what they mean.
"""

SHARE_BITS = 16
SHARE_ONE = 1 << SHARE_BITS
"""A whole expert, in units of shares."""
SWEEPS = 32
"""Of water-filling, on every backend: 256 experts in 288 slots on 32 ranks are then within 0.01 of
the best imbalance, in the worst of many batches; with 16 of them within 0.014."""
