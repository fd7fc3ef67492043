"""Expert balance: which expert sits in which slot, and how it gets there."""
