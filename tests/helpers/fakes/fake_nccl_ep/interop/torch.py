"""A communicator of the ranks of a process group."""

import torch.distributed as dist
from helpers.fakes.fake_nccl_ep import Communicator


def get_nccl_comm_from_group(group: dist.ProcessGroup) -> Communicator:
    return Communicator(group)
