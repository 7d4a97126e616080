"""Within a pass of a real rank nothing asks for values, which on a GPU would wait for all that is
queued: the host stays ahead from the first micro-batch to the last.

Counted on CPU tensors, each of which stands for one on the GPU, so that reading a tensor that is on
the host anyway counts too. ``tests/unit/actor/test_no_waiting.py`` has what meta tensors show.
"""

import contextlib
import dataclasses
import sys
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlmath.actor import model_base
from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.value import ValueModel
from rlmath.model.parallel import Layout
from tests.support.actors import build, make_batch, with_log_probs
from tests.support.models import make_mixture

ONE, EP2 = Layout(1, 1, 1), Layout(1, 1, 2, expert_parallel=2)
# The size of their result is known only once their input is.
OF_UNKNOWN_SIZE = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
# Operations of torch on CPU tensors without an operator: methods, and copies of host data.
READS = ("tolist", "numpy", "cpu", "to")
COPIES = ("tensor", "as_tensor", "from_numpy")


# By place. Zeros at a mask are written by a kernel; the rest reads what is on the host on CUDA too.
ALLOWED = {
    "layers.py:forward",
    "schedules.py:backward_step",
    "schedules.py:forward_step_calc_loss",
    "rotary_pos_embedding.py:get_emb",
    "random.py:fork",
    "cpu_ops.py:_cos_sin",
}
# The number of tokens of each expert; on CUDA a kernel of Transformer Engine sorts them.
OF_EXPERTS = {
    "moe_utils.py:permute",
    "moe_utils.py:sort_chunks_by_idxs",
    "experts.py:forward",
    "router.py:gating",
    "cpu_shim.py:<genexpr>",
}


class Waits(TorchDispatchMode):
    """Counts what waits, by operator and by the innermost function of rlmath or Megatron."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        # Indices by a mask, and repetitions whose sum nobody says.
        indices = args[1] if name.startswith("index") and isinstance(args[1], list) else ()
        by_mask = any(isinstance(x, Tensor) and x.dtype is torch.bool for x in indices)
        repeats = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in OF_UNKNOWN_SIZE or by_mask or repeats:
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, name):
        frame = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if "/rlmath/" in path or "/megatron/" in path:
                self.found[name, f"{path.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1
                return
            frame = frame.f_back

    @contextlib.contextmanager
    def watching(self):
        def note(name, original):
            def call(*args, **kwargs):
                places = {str(x) for x in (*args[1:], *kwargs.values())}
                waits = "cpu" in places and not kwargs.get("non_blocking")
                if name != "to" or waits:
                    self.note(name)
                return original(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for owner, names in ((Tensor, READS), (torch, COPIES)):
                for name in names:
                    found = note(name, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, found))
            with self:
                yield


def run(layout, platform, model, changes, passes, with_values):
    waits, schedule = Waits(), model_base.run_schedule

    def watch_schedule(*args, **kwargs):
        with waits.watching():
            return schedule(*args, **kwargs)

    settings = ModelSettings(torch.float32, sequence_parallel=True, logits="chunked")
    actor = build(layout, platform, model, model=settings, **changes)
    batch, plan = with_log_probs(make_batch()), StepPlan(minibatches=2)
    shard = actor.shard_of(batch, plan)
    with mock.patch.object(model_base, "run_schedule", watch_schedule):
        for name in passes:
            actor.shard_log_probs(shard, name)
        actor.update_shard(shard, plan)
        if with_values:
            values = torch.zeros(batch.loss_mask.numel())
            batch = dataclasses.replace(batch, values=values, returns=values)
            ValueModel(actor.settings, layout, platform).update(batch, plan, 0)
    assert all(one.decoder.input_tensor is None for one in actor.chunks), "kept between passes"
    return dict(waits.found)


def unexpected_waits(found, allowed):
    return {key: count for key, count in found.items() if key[1] not in allowed}


def test_waits_are_detected():
    rows, mask = torch.arange(3.0), torch.tensor([True, False, True])
    waits = Waits()
    code = """
def f(rows, mask):
    rows.sum().item(); bool(mask.any()); rows.tolist(); rows.cpu(); mask.nonzero()
    rows[mask]; rows.to("cpu"); torch.tensor([1]); rows.to(rows.dtype)
"""
    there = {"torch": torch}
    exec(compile(code, "/rlmath/made.py", "exec"), there)
    with waits.watching():
        there["f"](rows, mask)
    expected = {"_local_scalar_dense": 2, "tolist": 1, "cpu": 1, "nonzero": 1, "index": 1, "to": 1}
    assert waits.found == {(name, "made.py:f"): n for name, n in {**expected, "tensor": 1}.items()}


@pytest.mark.parametrize(
    "layout", [ONE, Layout(2, 2, 1), Layout(1, 2, 1, virtual_stages=2)], ids=str
)
def test_dense_step_has_no_unexpected_waits(ranks, tiny_model, layout):
    changes = {"reference": "frozen"}
    for found in ranks.run(layout, run, tiny_model, changes, ("old", "reference"), True):
        assert unexpected_waits(found, ALLOWED) == {}


@pytest.mark.parametrize("replay", ["none", "old_log_probs"])
def test_moe_step_waits_only_for_expert_counts(ranks, tmp_path, replay):
    """Only for the number of tokens of each expert."""
    changes = {"routing_replay": replay}
    for found in ranks.run(EP2, run, make_mixture(tmp_path), changes, ("old",), False):
        assert unexpected_waits(found, ALLOWED | OF_EXPERTS) == {}
