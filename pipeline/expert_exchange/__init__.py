"""The expert exchange of fixed capacity: no host reads a count, and messages have one size."""
