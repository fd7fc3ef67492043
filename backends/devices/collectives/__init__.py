"""A communicator over a vendor's collective communication library (CCL), shared by NCCL and HCCL.

Each library provides `ccl.Ccl` and `ccl.CclComm`.
"""
