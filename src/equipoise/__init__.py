"""Keeps Mixture-of-Experts serving in balance on any accelerator.

Importing this package imports no vendor module, initialises no device and starts no thread.
"""

__version__ = "0.1.0"
