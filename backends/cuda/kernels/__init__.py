"""The small kernels in Triton: one module a verb, each with its device functions and its launcher.

Importing any module here imports Triton; importing this package does not.
"""
