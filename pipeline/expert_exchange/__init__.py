"""The expert exchange of fixed capacity: no host reads a count, and no buffer is made in a step."""
