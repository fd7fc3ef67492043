"""The expert exchange of fixed capacity: no host reads a count, messages have one place and size."""
