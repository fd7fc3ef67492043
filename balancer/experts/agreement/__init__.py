"""Agreement between the ranks of a group: votes, and checks of equal values."""
