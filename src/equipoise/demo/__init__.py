"""The shipped model and its serve loop."""
