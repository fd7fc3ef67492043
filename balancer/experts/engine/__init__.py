"""The state machine of rebalances."""
