"""Runs of an actor that are saved and resumed, and all that training leaves on a rank."""

import dataclasses
import random
from unittest import mock

import numpy as np
import pytest
import torch

from rlmath.actor.token_values import TokenValues
from rlmath.checkpoint import CheckpointStore, memory
from rlmath.checkpoint.child_writer import ChildWriter
from rlmath.checkpoint.state import begin_saves, load_model, save_model
from rlmath.config.optimizer import Schedule
from tests.support.actors import UPDATE, build, make_batch, with_log_probs

# A schedule whose learning rate differs at every step, so that its place shows.
SCHEDULE = {"schedule": Schedule.linear, "warmup_steps": 2, "decay_steps": 12}


def changes_of(distributed, **others):
    return {"optimizer": {"distributed": distributed, **SCHEDULE}, **others}


@dataclasses.dataclass
class After:
    """State of a rank after its updates."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    adam: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
    draws: list[float]
    values: TokenValues | None


def go_on(actor, batch, steps):
    """Draw from each random stream, update, and look at everything that training leaves."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    draws = [random.random(), random.gauss(0, 1), *np.random.standard_normal(3)]
    draws += torch.rand(2).tolist()
    with get_cuda_rng_tracker().fork():
        draws += torch.rand(2).tolist()
    metrics = [m for i in range(steps) for m in actor.update(batch, UPDATE, seed=i).minibatches]
    parts = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    adam = [
        (p.detach().clone(), {k: v.clone() for k, v in part.optimizer.state[p].items()})
        for part in parts
        for group in part.optimizer.param_groups
        for p in group["params"]
    ]
    actor.load_parameters()
    weights = {n: p.detach().clone() for n, p in actor.module.named_parameters()}
    return After(metrics, weights, adam, draws, actor.log_probs(batch))


def run_save(layout, platform, model, changes, folder, before, after, in_background=False):
    # Far below the size of the tiny model, so that it is gathered in many steps.
    memory.GATHER_BUFFER_BYTES = 2**14
    batch = with_log_probs(make_batch())
    actor = build(layout, platform, model, **changes)
    for step in range(before):
        actor.update(batch, UPDATE, seed=100 + step)
    random.gauss(0, 1)  # Leaves half a pair of normal numbers behind, in Python's stream
    np.random.standard_normal()  # and in NumPy's.
    if not in_background:
        save_model(actor, folder)
        return go_on(actor, batch, after)
    write = ChildWriter.write
    with mock.patch.object(ChildWriter, "write", autospec=True, side_effect=write) as child:
        pending = begin_saves({"actor": actor}, folder)
        result = go_on(actor, batch, after)
        pending.result()
    assert child.call_count == 1
    return result


def run_load(layout, platform, model, changes, folder, after):
    actor = build(layout, platform, model, **changes)
    load_model(actor, folder)
    return go_on(actor, with_log_probs(make_batch()), after)


def commit(folder, run):
    """Results of ``run(partial)``, and the folder of the checkpoint of step 2 that it saves."""
    store = CheckpointStore(folder, keep=2)
    found = run(str(store.begin(2)))
    return found, str(store.commit(2, {}, {}))


def assert_close(one, other, rel=1e-5):
    """Metrics of another layout, where sums have another order."""
    for metrics, expected in zip(one.metrics, other.metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=rel, abs=1e-6)


def assert_equal(one, other):
    assert one.draws == other.draws
    assert one.metrics == other.metrics
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name
    for (main, state), (other_main, other_state) in zip(one.adam, other.adam, strict=True):
        assert torch.equal(main, other_main)
        assert state.keys() == other_state.keys()
        for name, value in state.items():
            assert torch.equal(value, other_state[name]), name
