"""``actor.overlap_param_gather`` on gloo ranks: weights that come during a forward pass are those
that came before it, and nobody reads them before they are there.

Gathers are late here (``late_gathers.py``), so that whoever does not wait reads old values, and
buckets hold a few thousand elements, so that there are many of them.
"""

import dataclasses
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlmath.actor.model import ModelSettings
from rlmath.actor.parameter_gather import ParameterGather
from rlmath.actor.plan import StepPlan
from rlmath.actor.value import ValueModel
from rlmath.actor.worker import ActorWorker
from rlmath.checkpoint.optimizer_state import optimizer_parts
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from tests.distributed.late_gathers import late_gathers, set_under_way
from tests.distributed.test_overlap import in_small_buckets
from tests.support.actors import UPDATE, build, make_batch, with_log_probs
from tests.support.models import make_glm, make_hybrid, make_latent
from tests.support.resumed_runs import assert_equal, changes_of, commit, run_load, run_save

SETTINGS = ModelSettings(torch.bfloat16, sequence_parallel=True, logits="chunked")
OVERLAPPED = {"overlap_gradients": True, "overlap_param_gather": True}


def adam_of(actor):
    """Main parameters and moments of this rank."""
    found = []
    for part in optimizer_parts(actor.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [parameter, *(state[key] for key in ("exp_avg", "exp_avg_sq"))]
    return [one.detach().clone() for one in found]


@dataclasses.dataclass
class After:
    metrics: list[dict[str, float]]
    weights: list[Tensor]
    adam: list[Tensor]
    pending: int


def after_updates(layout, platform, model, batch, changes):
    """Two updates of several minibatches, without a reader between them."""
    with in_small_buckets(), late_gathers():
        actor = build(layout, platform, model, **{"model": SETTINGS, **changes})
        metrics = [one for seed in (0, 1) for one in actor.update(batch, UPDATE, seed).minibatches]
        groups = actor.parameter_gather._groups
        pending = sum(group.param_gather_handle is not None for group in groups)
        assert pending == len(groups), "the last gathers are left to whoever reads"
        actor.load_parameters()
        weights = [one.detach().clone() for one in actor.module.parameters()]
        return After(metrics, weights, adam_of(actor), pending)


def run(layout, platform, model, batch, changes):
    """Equal to the last bit with and without, on this rank."""
    base = {**OVERLAPPED, **changes}
    without = {**base, "overlap_param_gather": False}
    alone, found = (
        after_updates(layout, platform, model, batch, given) for given in (without, base)
    )
    assert alone.pending == 0 and found.pending > 2
    assert alone.metrics == found.metrics
    for one, other in (*zip(alone.weights, found.weights, strict=True),):
        assert one.equal(other)
    assert alone.adam, "there is state to compare"
    for one, other in zip(alone.adam, found.adam, strict=True):
        assert one.equal(other)


FLOAT32 = {"model": dataclasses.replace(SETTINGS, dtype=torch.float32, logits="whole")}
LORA = {"lora": Lora(rank=16, alpha=4.0, targets=("q_proj", "up_proj"))}
AGAIN = {"model": dataclasses.replace(SETTINGS, recompute="full")}


@pytest.mark.parametrize(
    ("model", "layout", "changes"),
    [
        ("untied", Layout(1, 1, 2), AGAIN),
        # Other types, and a table of one stage.
        pytest.param("untied", Layout(2, 1, 2), FLOAT32, marks=pytest.mark.long),
        pytest.param("tied", Layout(1, 1, 2), {}, marks=pytest.mark.long),
        # The last stage's copy of the table is read by the output layer alone.
        ("tied", Layout(1, 2, 2, virtual_stages=2), {}),
        ("mixture", Layout(1, 1, 4, expert_parallel=2), {}),
        ("untied", Layout(1, 1, 2), LORA),
    ],
    ids=str,
)
def test_weights_state_and_metrics_are_the_same_to_the_last_bit(
    ranks, models, model, layout, changes
):
    ranks.run(layout, run, models[model], with_log_probs(make_batch()), changes)


def worker_of(layout, platform, model, lora, value):
    """A rank that has taken one step, all of its weights complete."""
    worker = ActorWorker.__new__(ActorWorker)
    worker.rank, worker.platform, worker.value_model = 0, platform, None
    worker._peaks, worker.gatherer = {}, None
    changes = {**OVERLAPPED, "model": SETTINGS, "reference": "reset"}
    batch = with_log_probs(make_batch())
    with in_small_buckets():
        worker.actor = build(layout, platform, model, **changes, offload="all", lora=lora)
        if value:
            worker.value_model = ValueModel(
                dataclasses.replace(worker.actor.settings, reference="none"), layout, platform
            )
    worker.actor.update(batch, UPDATE, seed=0)
    worker.actor.load_parameters()
    if value:
        moved = dataclasses.replace(batch, returns=torch.ones(batch.loss_mask.numel()))
        moved = dataclasses.replace(moved, values=torch.zeros_like(moved.returns))
        worker.value_model.update(moved, StepPlan(minibatches=2), seed=0)
        worker.value_model.load_parameters()
    if lora is not None:
        plan = SimpleNamespace(bucket_size_mib=1)
        worker.adapter_source = worker._adapter_source(plan)
    return worker


def weights(worker):
    return [one.detach().flatten().tolist() for one in worker.actor.module.parameters()]


def load_weights(worker):
    worker.load_parameters()
    return weights(worker)


def sync_prints(worker):
    """Fingerprints that a weight sync reads, of merged weights under LoRA."""
    return worker._gatherer().fingerprints()


def through_host_memory(worker):
    """Weights that leave the device."""
    worker.actor.begin_release(lambda: None)
    worker.actor.release()
    found = worker._gatherer().fingerprints()
    worker.actor.load_parameters()
    return found, weights(worker)


def reference_pass(worker):
    found = worker.actor.log_probs(with_log_probs(make_batch()), "reference")
    return found.log_probs.tolist()


def renewed_reference(worker):
    assert worker.actor.reference is not None
    before = [one.clone() for one in worker.actor.reference]
    worker.renew_reference(0.5, clear_optimizer=False)
    found = [one.flatten().tolist() for one in worker.actor.reference]
    worker.actor.reference = before
    return found


def checkpoint(worker):
    """State dicts that a checkpoint reads, from the worker and alone."""
    with worker._readable():
        return weights(worker)


def checkpoint_alone(worker):
    worker.actor.checkpoint_state()
    return weights(worker)


def export(worker):
    with tempfile.TemporaryDirectory() as folder:
        target = [folder]
        dist.broadcast_object_list(target)
        # The first rank writes, of what all have.
        path = f"{target[0]}/hf"
        worker.save_hf(path, worker.actor.settings.model_path, None)
        dist.barrier()
        found = {
            name: value.flatten().tolist()
            for file in sorted(Path(path).glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        dist.barrier()
    return found


def adapters(worker):
    return worker.adapter_source.fingerprints()


def values_prints(worker):
    return worker.value_model.weight_prints()


READERS = [
    load_weights,
    sync_prints,
    through_host_memory,
    reference_pass,
    renewed_reference,
    checkpoint,
    checkpoint_alone,
    export,
]


def run_readers(layout, platform, model, lora, value):
    worker = worker_of(layout, platform, model, lora, value)
    models = list(worker._models().values())
    complete = [one.detach().clone() for m in models for one in m.module.parameters()]

    def under_way():
        """As after an optimizer step, whatever a reader has left."""
        for one in models:
            one.parameter_gather.finish()
        for one, value in zip(
            (p for m in models for p in m.module.parameters()), complete, strict=True
        ):
            one.detach().copy_(value)
        for one in models:
            set_under_way(one.parameter_gather)

    wrong = []
    for reader in [*READERS, *([adapters] if lora else []), *([values_prints] if value else [])]:
        right = reader(worker)
        under_way()
        if reader(worker) != right:
            wrong.append(f"{reader.__name__} reads weights that are not there")
        under_way()
        with mock.patch.object(ParameterGather, "finish", lambda _: None):
            # It would show: the reader has no other place where it waits.
            if reader(worker) == right:
                wrong.append(f"{reader.__name__} waits for nothing")
        under_way()
        for one in models:
            one.parameter_gather.finish()
    return wrong


@pytest.mark.parametrize("lora", [None, LORA["lora"]], ids=["all weights", "adapters"])
def test_every_reader_waits_for_the_weights(ranks, models, lora):
    """And each would read others if it did not."""
    arguments = (models["untied"], lora, lora is None)
    assert ranks.run(Layout(1, 1, 2), run_readers, *arguments) == [[], []]


def run_unwaited(layout, platform, model, batch):
    """Whether an update shows a module that does not wait for its weights."""
    changes = {**OVERLAPPED, "model": SETTINGS}
    both = []
    for waits in (True, False):
        with in_small_buckets(), late_gathers():
            actor = build(layout, platform, model, **changes)
            if not waits:
                for one in actor.models:
                    one.disable_forward_pre_hook(param_sync=False)
            both.append(actor.update(batch, UPDATE, seed=0).minibatches)
    first, second = both
    return first[0] == second[0] and first[1] != second[1]


def test_a_forward_pass_that_does_not_wait_shows(ranks, models):
    batch = with_log_probs(make_batch())
    assert ranks.run(Layout(1, 1, 2), run_unwaited, models["untied"], batch) == [True, True]


def run_calls(layout, platform, model):
    """Modules that have weights, and that a forward pass does not call."""
    actor = build(layout, platform, model, model=SETTINGS)
    left = {
        one: name
        for name, one in actor.module.named_modules()
        if any(True for _ in one.parameters(recurse=False))
    }
    assert len(left) > 10
    for one in left:
        one.register_forward_pre_hook(lambda module, _: left.pop(module, None) and None)
    actor.log_probs(make_batch())
    return list(left.values())


@pytest.mark.parametrize("make", [make_hybrid, make_glm, make_latent])
def test_a_pass_calls_every_module_with_weights(ranks, make, tmp_path):
    """Megatron waits for a gather when a module is called, and not when another reads its
    weights."""
    assert ranks.run(Layout(1, 1, 1), run_calls, make(tmp_path)) == [[]]


def run_gathers(layout, platform, model, batch):
    """Gathers that begin in an update, in one whose minibatches are all discarded, and in passes
    that follow a discarded one."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    begun = []
    plainly = Group.start_param_sync

    def start(group, force_sync=False):
        if group.param_gather_handle is None:
            begun.append(group)
        plainly(group, force_sync)

    with in_small_buckets():
        actor = build(layout, platform, model, **OVERLAPPED, model=SETTINGS)
    nothing = dataclasses.replace(UPDATE, early_stop_ratio=1e-9)
    found = []
    with mock.patch.object(Group, "start_param_sync", start):
        for update in (UPDATE, nothing):
            actor.update(batch, update, seed=0)
            found.append(len(begun))
            begun.clear()
        actor.log_probs(batch)
        found.append(len(begun))
    return [*found, len(actor.parameter_gather._groups)]


def test_only_what_the_optimizer_changed_is_gathered(ranks, models):
    """Once for each minibatch, and not for one that is discarded."""
    batch = with_log_probs(make_batch())
    for update, nothing, after, groups in ranks.run(
        Layout(1, 1, 2), run_gathers, models["untied"], batch
    ):
        assert update == 2 * groups > 4
        assert nothing == after == 0


def save_small(*given):
    with in_small_buckets(), late_gathers():
        return run_save(*given)


def load_small(*given):
    with in_small_buckets(), late_gathers():
        return run_load(*given)


def test_a_checkpoint_resumes_bit_by_bit_without_it_too(ranks, models, tmp_path):
    """It is saved with gathers running."""
    layout, changes = Layout(1, 1, 2), changes_of(True, model=SETTINGS, overlap_gradients=True)
    overlapped = {**changes, "overlap_param_gather": True}
    straight, folder = commit(
        tmp_path,
        lambda partial: ranks.run(layout, save_small, models["untied"], overlapped, partial, 1, 1),
    )
    for given in (overlapped, changes):
        again = ranks.run(layout, load_small, models["untied"], given, folder, 1)
        for one, other in zip(straight, again, strict=True):
            assert_equal(one, other)
