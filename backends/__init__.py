"""One folder per accelerator."""
