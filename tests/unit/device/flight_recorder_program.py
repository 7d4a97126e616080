"""Writes records of two ranks as torch's flight recorder does: real ones of a gloo group of one
rank, in which the group is said to be of two and rank 1 has not entered the last collective."""

import copy
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from rlmath.device.flight_recorder import PREFIX

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group([0], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
ones = torch.ones(4)
dist.all_reduce(ones, group=group)
dist.reduce_scatter_tensor(torch.ones(4), ones, group=group)
recorded = pickle.loads(_dump_fr_trace(True, True, False))
name, description = recorded["entries"][0]["process_group"]
# As NCCL's groups are recorded; gloo's leave it open.
recorded["pg_config"] = {name: {"name": name, "desc": description, "ranks": "[0, 1]"}}
for rank in range(2):
    own = copy.deepcopy(recorded)
    if rank == 1:
        own["entries"].pop()
    Path(sys.argv[1], f"{PREFIX}{rank}").write_bytes(pickle.dumps(own))
