"""How the ranks of a group agree on what to do."""
