"""The small kernels in Triton: a module per operation, with its device functions and launcher.

Importing any module here imports Triton; importing this package does not.
"""
