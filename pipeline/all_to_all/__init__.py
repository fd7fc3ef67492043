"""MoE dispatch and combine over an all-to-all, with fixed capacities or variable sizes."""
