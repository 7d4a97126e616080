"""``actor.offload`` on gloo ranks: training is the same to the last bit, and memory is free."""

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmath.actor.model import ModelSettings
from rlmath.actor.policy import MegatronActor
from rlmath.actor.settings import ActorSettings
from rlmath.actor.value import ValueModel
from rlmath.actor.worker import ActorWorker
from rlmath.checkpoint.optimizer_state import optimizer_parts
from rlmath.config.optimizer import OptimizerConfig
from rlmath.device.residue import Residue
from rlmath.model.parallel import Layout
from rlmath.weights.gather import BucketGatherer
from tests.support.actors import UPDATE, make_batch, with_log_probs


def build(layout, platform, model, offload, *, dtype=torch.bfloat16, value, in_backward=False):
    settings = ActorSettings(
        model_path=model,
        model=ModelSettings(dtype, sequence_parallel=True),
        optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-5, clip_grad_norm=1.0),
        temperature=0.7,
        max_tokens_per_microbatch=64,
        max_sequence_length=64,
        reference="reset",
        offload=offload,
        offload_in_backward=in_backward,
    )
    worker = ActorWorker.__new__(ActorWorker)
    worker.rank, worker.platform, worker.value_model = 0, platform, None
    worker._peaks = {}
    worker.actor = MegatronActor(settings, layout, platform)
    worker.actor.release()
    if value:
        none = dataclasses.replace(settings, reference="none")
        worker.value_model = ValueModel(none, layout, platform)
        worker.value_model.release()
    worker.gatherer = BucketGatherer(
        worker.actor.chunks,
        worker.actor.spec,
        worker.actor.parallel,
        read=worker.actor.device_state.read,
    )
    return worker


def one_step(worker, batch, seed):
    """As ``train_step`` calls a rank, up to the point where engines have all memory."""
    passes = ("old", "reference", "values") if worker.value_model else ("old", "reference")
    plan = dataclasses.replace(UPDATE, passes=passes)
    found = [worker.run_part(worker.actor.shard_of(batch, plan, seed), plan)]
    report = worker.finish_step(plan, None)
    found += [report.values, None if report.policy is None else report.policy.minibatches]
    worker.renew_reference(0.5, clear_optimizer=seed == 0)
    # The copies are begun: what comes between them and the release changes no bit.
    begun = worker.actor.device_state
    assert worker.actor.settings.offload == "none" or "gradients" in begun._released
    worker.begin_room()
    if worker.actor.settings.offload != "none":
        assert "optimizer" not in begun._released or seed == 0, "cleared, it left the device"
    beside_weights = worker.make_room("weights")
    sent = worker.weights_fingerprints()
    offloaded = worker.make_room("kv_cache")
    assert worker.weights_fingerprints() == sent, "read from host memory, or from the device"
    return repr(found), sent, (beside_weights, offloaded)


def state_of(worker):
    """Weights, main parameters and Adam's state of the rank's models."""
    found = {}
    for name, model in worker._models().items():
        model.device_state.load("parameters", "optimizer", "gradients")
        for key, parameter in model.module.named_parameters():
            found[f"{name} {key}"] = parameter.detach().clone()
        for number, part in enumerate(optimizer_parts(model.optimizer)):
            for group in part.optimizer.param_groups:
                for place, parameter in enumerate(group["params"]):
                    found[f"{name} main {number}.{place}"] = parameter.detach().clone()
                    for key, value in part.optimizer.state[parameter].items():
                        found[f"{name} {key} {number}.{place}"] = value.clone()
    return found


def bytes_left(worker, before):
    """Bytes of tensors in this process, but for the copies that ought to be there."""
    wanted = [*(worker.actor.reference or [])]
    for model in worker._models().values():
        wanted += model.device_state._host.values()
    known = {one.untyped_storage()._cdata for one in wanted} | before
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if isinstance(o, Tensor)]
    found = {one._cdata: one.nbytes() for one in storages if one._cdata not in known}
    return sum(found.values())


def watch_backward(model, seen):
    """Note whether the optimizer's state is off the device after each backward pass."""
    run = model.forward_backward

    def watch(*args):
        outcomes = run(*args)
        seen.append("optimizer" in model.device_state._released)
        return outcomes

    model.forward_backward = watch


@dataclasses.dataclass
class Found:
    """Results of a rank with one value of ``actor.offload``."""

    steps: list[Any]
    state: dict[str, Tensor]
    residue: tuple[Residue, Residue]
    bytes_left: int
    out_in_backward: list[bool]


def run(layout, platform, model, batch, folder):
    """Two steps with a checkpoint between them, and the second one again from the checkpoint;
    what is wrong on this rank."""

    def run_mode(offload):
        before = {o.untyped_storage()._cdata for o in gc.get_objects() if isinstance(o, Tensor)}
        worker = build(
            layout, platform, model, offload, value=True, in_backward=offload == "optimizer"
        )
        seen = []
        for one in worker._models().values():
            watch_backward(one, seen)
        steps = [one_step(worker, batch, seed=0)]
        left = bytes_left(worker, before)
        if offload == "all":
            worker.save_checkpoint(folder, in_background=True)
        steps.append(one_step(worker, batch, seed=1))
        state = state_of(worker)
        if offload == "all":
            worker.finish_checkpoint()
            worker.load_checkpoint(folder)
            steps.append(one_step(worker, batch, seed=1))
        return Found([one[:2] for one in steps], state, steps[1][2], left, seen)

    none, optimizer, everything = map(run_mode, ("none", "optimizer", "all"))
    first, second = none.steps
    held = none.residue[1].device_bytes
    right = {
        "optimizer: steps": optimizer.steps == [first, second],
        "all: steps, and the second again after the load": everything.steps
        == [first, second, second],
        # Two steps, or three, of two minibatches; the first update compares two gradients more.
        "optimizer: out in every backward pass": all(optimizer.out_in_backward)
        and len(optimizer.out_in_backward) == 10,
        "all: in": not any(everything.out_in_backward),
        "tensors": none.state.keys() == optimizer.state.keys() == everything.state.keys(),
        # 2 bytes a weight, 4 of its gradient, and Adam's 12 over the copies that share them.
        "optimizer: device": optimizer.residue[1].device_bytes <= 0.36 * held,
        "all: device": everything.residue[1].device_bytes < 0.01 * held,
        "all: weights stay to be sent": everything.residue[0].device_bytes > 0.05 * held,
        "gradients have no copy": everything.residue[1].host_bytes < 0.9 * held,
        # Adam's probe keeps a few elements of every tensor of the first two steps.
        "nothing else holds what was released": everything.bytes_left < 0.03 * held,
    }
    for name, value_ in none.state.items():
        for other in (optimizer, everything):
            right[name] = right.get(name, True) and torch.equal(value_, other.state[name])
    return [name for name, holds in right.items() if not holds]


@pytest.fixture(scope="module")
def batch():
    one = with_log_probs(make_batch())
    generator = torch.Generator().manual_seed(3)
    total = one.loss_mask.numel()
    return dataclasses.replace(one, returns=torch.randn(total, generator=generator))


# Tensor ranks: a run of tests/faults offloads and is compared with one that does not.
@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 2), pytest.param(Layout(2, 1, 2), marks=pytest.mark.long)], ids=str
)
def test_training_is_the_same_to_the_last_bit(layout, ranks, tiny_model, batch, tmp_path):
    """Metrics, weights, main parameters and Adam's state, and a resume from a checkpoint that was
    written while all was in host memory; and that memory is given back."""
    found = ranks.run(layout, run, tiny_model, batch, str(tmp_path))
    assert found == [[]] * layout.world_size


def run_float32(layout, platform, model, batch):
    """Main parameters of a float32 model are views of Megatron's buffer of parameters."""
    both = []
    for offload in ("none", "all"):
        worker = build(layout, platform, model, offload, dtype=torch.float32, value=False)
        steps = [one_step(worker, batch, seed)[:2] for seed in (0, 1)]
        both.append((steps, state_of(worker)))
    (steps, state), (same_steps, same_state) = both
    return steps == same_steps and all(torch.equal(state[k], same_state[k]) for k in state)


def test_a_float32_model_too(ranks, tiny_model, batch):
    assert ranks.run(Layout(1, 1, 2), run_float32, tiny_model, batch) == [True, True]
