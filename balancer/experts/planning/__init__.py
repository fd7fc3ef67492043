"""Planning: from load to a placement, a migration plan and a proposal."""
