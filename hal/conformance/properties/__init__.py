"""The properties of the suite, one module a family."""
