"""The expert exchange: MoE dispatch and combine over an all-to-all, with fixed or variable sizes."""
