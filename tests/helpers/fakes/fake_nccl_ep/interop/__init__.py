"""How NCCL-EP meets other packages."""
