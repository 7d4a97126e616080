"""Gloo groups on one device: as many groups as wanted, one thread that polls."""

import subprocess
import sys

RANK = """
import os, sys, datetime
import torch, torch.distributed as dist
rank, store, shared = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "shared"
if shared:
    from rlmath.device.gloo import share_device
    share_device()
    share_device()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=60)) for _ in range(5)]
groups += [dist.new_group([r]) for r in range(2)]
for i, group in enumerate([dist.group.WORLD, *groups]):
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        continue
    x = torch.full((3,), float(rank + i))
    dist.all_reduce(x, group=group)
    expected = 2 * i + 1 if dist.get_world_size(group) == 2 else rank + i
    assert x.tolist() == [expected] * 3, (i, x)
assert dist.get_backend(groups[0]) == "gloo"
names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
print(names.count("gloo_tcp_loop"))
# Gone and made again: the device stays good.
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{store}2", rank=rank, world_size=2)
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 2
dist.barrier()
dist.destroy_process_group()
"""


def test_groups_share_a_device(tmp_path):
    counts = {}
    for kind in ("shared", "torch's"):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(tmp_path / kind), kind],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        answers = [rank.communicate(timeout=120) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], answers
        counts[kind] = [int(out) for out, _ in answers]
    # The reason for sharing; if torch shares one day, ours can go.
    assert counts == {"shared": [1, 1], "torch's": [7, 7]}
