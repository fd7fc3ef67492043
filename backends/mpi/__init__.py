"""A communicator over MPI, for any accelerator: host-staged, started by mpiexec.

Importing it needs no MPI: mpi4py is imported by whoever joins or connects.
"""

from equipoise.backends.mpi.backend import MpiBackend

BACKEND = MpiBackend()

__all__ = ["BACKEND"]
