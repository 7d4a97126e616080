"""Checkpoints on real gloo ranks: a resumed run equals one that never stopped."""

import dataclasses
import pickle
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from rlmath.actor import parallel
from rlmath.actor.model import ModelSettings
from rlmath.actor.policy import MegatronActor
from rlmath.actor.settings import ActorSettings
from rlmath.actor.stops import Stops
from rlmath.actor.value import ValueHead
from rlmath.actor.worker import ActorWorker
from rlmath.checkpoint import CheckpointStore, memory
from rlmath.checkpoint.manifest import read_manifest
from rlmath.checkpoint.model_state import sharded_weights
from rlmath.checkpoint.optimizer_state import sharded_optimizer_state
from rlmath.checkpoint.state import load_model, save_model
from rlmath.checkpoint.writer import background_group
from rlmath.config.optimizer import OptimizerConfig
from rlmath.errors import UserError
from rlmath.model.parallel import Layout
from tests.support.actors import UPDATE, build, gather, make_batch, with_log_probs
from tests.support.resumed_runs import (
    assert_close,
    assert_equal,
    changes_of,
    commit,
    go_on,
    run_load,
    run_save,
)
from tests.unit.checkpoint.small_disk import small_disk

TP2, PP2, DP2 = Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)
BF16 = ModelSettings(torch.bfloat16, sequence_parallel=True)


@pytest.mark.parametrize(
    ("layout", "changes", "in_background"),
    [
        (TP2, changes_of(True), True),
        # tests/faults saves in the foreground.
        pytest.param(TP2, changes_of(False, model=BF16), False, marks=pytest.mark.long),
        (DP2, changes_of(True, model=BF16), True),
    ],
    ids=["tp2 background", "tp2 plain, bfloat16", "dp2 bfloat16, background"],
)
def test_resuming_in_the_same_layout_is_bit_equal(
    ranks, tiny_model, tmp_path, layout, changes, in_background
):
    given = (in_background,)
    straight, folder = commit(
        tmp_path,
        lambda partial: ranks.run(layout, run_save, tiny_model, changes, partial, 2, 2, *given),
    )
    # Each rank wrote a part, data-parallel ones too, which hold the same.
    parts = sorted((Path(folder) / "actor").glob("*.distcp"))
    assert [part.name for part in parts] == ["__0_0.distcp", "__1_0.distcp"]
    assert max(p.stat().st_size for p in parts) < 1.2 * min(p.stat().st_size for p in parts)
    resumed = ranks.run(layout, run_load, tiny_model, changes, folder, 2)
    for one, other in zip(straight, resumed, strict=True):
        assert_equal(one, other)


# Sums over other ranks round differently, and Adam makes of a rounding of a tiny gradient a step of
# full size. Over three updates that came to 2e-6 of any metric and 5e-6 of log-probs.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("before", "after", "distributed"),
    [
        # tests/faults changes tensor parallelism to pipeline stages.
        pytest.param(TP2, Layout(1, 2, 1, pipeline_layers=(1, 3)), False, marks=pytest.mark.long),
        (Layout(2, 2, 1, pipeline_layers=(3, 1)), DP2, True),
        (Layout(1, 1, 1), Layout(2, 1, 1, context_parallel=2), True),
    ],
    ids=lambda value: str(value),
)
def test_resuming_in_another_layout_is_equal_up_to_rounding(
    ranks, tiny_model, tmp_path, before, after, distributed
):
    changes = changes_of(distributed)
    straight, folder = commit(
        tmp_path, lambda partial: ranks.run(before, run_save, tiny_model, changes, partial, 2, 3)
    )
    resumed = ranks.run(after, run_load, tiny_model, changes, folder, 3)
    # Three further updates of two minibatches: a wrong step count shows from the second on.
    assert len(straight[0].metrics) == 6
    for one in resumed:
        assert_close(one, straight[0], rel=TOLERANCE)
    for state in (state for one in resumed for _, state in one.adam):
        assert float(state["step"]) == 10.0
    batch = make_batch()
    torch.testing.assert_close(
        gather(batch, [one.values for one in resumed]).log_probs,
        gather(batch, [one.values for one in straight]).log_probs,
        atol=2e-5,
        rtol=0,
    )


def run_shares(layout, platform, model, loading):
    """Bytes that describing the optimizer's tensors takes on a rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    memory.GATHER_BUFFER_BYTES = 2**14
    actor = build(layout, platform, model, model=BF16, optimizer={"distributed": True})
    gathered = []

    def all_gather(out, mine, group=None):
        gathered.append(out.nbytes)
        return original(out, mine, group=group)

    original = dist.all_gather_into_tensor
    weights = sharded_weights(actor.module)
    dist.all_gather_into_tensor = all_gather
    try:
        state = sharded_optimizer_state(actor.optimizer, weights, loading)
    finally:
        dist.all_gather_into_tensor = original
    sizes = [one.numel() for one in actor.module.parameters()]
    return {
        "host_bytes": sum(one.data.nbytes for one in nested_values(state["param_state"])),
        "gathered_bytes": max(gathered, default=0),
        "parameters": sum(sizes),
        "bound": memory.checkpoint_bytes_of_rank(sum(sizes), layout.data_parallel, max(sizes)),
    }


@pytest.mark.parametrize("loading", [False, True], ids=["saving", "loading"])
def test_ranks_share_out_the_optimizers_tensors_in_bounded_memory(ranks, tiny_model, loading):
    """Megatron's own way has every rank hold all of them, and gathers them in one piece."""
    found = ranks.run(Layout(1, 1, 4), run_shares, tiny_model, loading)
    total = memory.STATE_BYTES_PER_PARAMETER * found[0]["parameters"]
    for one in found:
        assert 0 < one["host_bytes"] <= one["bound"].host_bytes < total
        assert one["gathered_bytes"] <= 2**14
        assert (one["gathered_bytes"] > 0) is not loading
    together = sum(one["host_bytes"] for one in found)
    # Each is saved once; a parameter whose parts lie on several ranks is loaded by each.
    assert together >= total if loading else together == total


def run_first_save(layout, platform, model, changes, folder):
    """Save before the first update, then continue."""
    actor = build(layout, platform, model, **changes)
    save_model(actor, folder)
    return go_on(actor, with_log_probs(make_batch()), 2)


def test_a_save_before_the_first_update_changes_nothing(ranks, tiny_model, tmp_path):
    layout, changes = Layout(1, 1, 1), changes_of(True)
    straight, folder = commit(
        tmp_path, lambda partial: ranks.run(layout, run_first_save, tiny_model, changes, partial)
    )
    (resumed,) = ranks.run(layout, run_load, tiny_model, changes, folder, 2)
    assert_equal(straight[0], resumed)
    (without,) = ranks.run(layout, run_without, tiny_model, changes)
    assert without.metrics == resumed.metrics


def run_without(layout, platform, model, changes):
    return go_on(build(layout, platform, model, **changes), with_log_probs(make_batch()), 2)


def run_reference(layout, platform, model, folder, save):
    """Weights of a model that is not trained, next to an actor's in the same checkpoint."""
    actor = build(layout, platform, model)
    settings = dataclasses.replace(actor.settings, optimizer=None)
    reference = MegatronActor(settings, layout, platform)
    if save:
        for parameter in reference.module.parameters():
            parameter.mul_(1.5)
        save_model(actor, folder)
        save_model(reference, folder, "reference")
    else:
        load_model(reference, folder, "reference")
    return {n: p.clone() for n, p in reference.module.named_parameters()}


def test_a_model_without_optimizer_is_saved_beside_the_actor(ranks, tiny_model, tmp_path):
    saved, folder = commit(
        tmp_path, lambda partial: ranks.run(PP2, run_reference, tiny_model, partial, True)
    )
    loaded = ranks.run(PP2, run_reference, tiny_model, folder, False)
    for one, other in zip(saved, loaded, strict=True):
        for name, weight in one.items():
            assert torch.equal(weight, other[name]), name


def run_renewed_reference(layout, platform, model, kind, folder, save):
    """Log-probs under a reference that training has changed, and under the policy."""
    actor = build(layout, platform, model, reference=kind)
    batch = with_log_probs(make_batch())
    if save:
        before = actor.log_probs(batch, "reference")
        for step in range(2):
            actor.update(batch, UPDATE, seed=step)
        actor.renew_reference(1.0 if kind == "reset" else 0.25, clear_optimizer=kind == "reset")
        if kind == "reset":
            moments = [s for s in actor.optimizer.optimizer.state.values() if s["exp_avg"].any()]
            assert not moments
        renewed = actor.log_probs(batch, "reference")
        if before is not None and renewed is not None:
            assert not torch.equal(before.log_probs, renewed.log_probs)
        save_model(actor, folder)
    else:
        load_model(actor, folder)
    return actor.log_probs(batch, "reference"), actor.log_probs(batch)


# One that is reset moves to host memory and back in test_offload.py.
@pytest.mark.parametrize(
    ("kind", "other"),
    [("averaged", PP2), pytest.param("reset", TP2, marks=pytest.mark.long)],
)
def test_a_reference_that_has_changed_is_in_the_checkpoint(
    ranks, tiny_model, tmp_path, kind, other
):
    saved, folder = commit(
        tmp_path,
        lambda partial: ranks.run(TP2, run_renewed_reference, tiny_model, kind, partial, True),
    )
    batch = make_batch()
    loaded = ranks.run(other, run_renewed_reference, tiny_model, kind, folder, False)
    one = gather(batch, [reference for reference, _ in saved]).log_probs
    again = gather(batch, [reference for reference, _ in loaded]).log_probs
    policy = gather(batch, [policy for _, policy in loaded]).log_probs
    torch.testing.assert_close(one, again, atol=1e-5, rtol=0)
    # A reset reference is the policy; an average is on the way to it.
    assert torch.equal(again, policy) is (kind == "reset")
    with pytest.raises(RuntimeError, match=f"reference {kind}.*algorithm.reference.kind"):
        ranks.run(Layout(1, 1, 1), run_load, tiny_model, {}, folder, 0)


def run_load_with(layout, platform, model, changes, folder):
    """Messages of a load, and the learning rate after it."""
    actor = build(layout, platform, model, **changes)
    try:
        load_model(actor, folder)
    except UserError as error:
        return str(error), 0.0
    return "", float(actor.optimizer.param_groups[0]["lr"])


def run_save_into(layout, platform, model, folder):
    actor = build(layout, platform, model)
    try:
        save_model(actor, folder)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_load_refusals_and_settings_after_a_load(ranks, tiny_model, tmp_path):
    said, folder = commit(
        tmp_path, lambda partial: ranks.run(TP2, run_save_into, tiny_model, partial)
    )
    assert said == ["", ""]
    assert read_manifest(Path(folder)).num_bytes > 0

    def load(**changes):
        results = ranks.run(TP2, run_load_with, tiny_model, changes, folder)
        assert len(set(results)) == 1
        return results[0]

    # A rollback with a lower learning rate: the settings decide.
    assert load(optimizer={"lr": 5e-4}) == ("", 5e-4)
    said, _ = load(optimizer={"distributed": False})
    assert "saved with optimizer distributed, and this run has plain" in said
    said, _ = load(model=BF16)
    assert "saved with dtype float32, and this run has bfloat16; set model.dtype" in said

    index = Path(folder) / "actor" / ".metadata"
    index.write_bytes(pickle.dumps(print))
    said, _ = load()
    assert "the index of tensors names builtins.print; refused" in said
    index.unlink()
    said, _ = load()
    assert ".metadata is missing" in said


def test_a_disk_that_runs_full_fails_on_all_ranks_and_spares_the_rest(ranks, tiny_model, tmp_path):
    with small_disk(tmp_path / "small", size_kib=16 * 1024) as where:
        store = CheckpointStore(where, keep=2)
        assert ranks.run(TP2, run_save_into, tiny_model, str(store.begin(1))) == ["", ""]
        first = store.commit(1, {}, {})
        partial = store.begin(2)
        # Room for the small files and a part of the tensors.
        used = read_manifest(first).num_bytes
        filler = where / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(where).free - used // 2))
        said = ranks.run(TP2, run_save_into, tiny_model, str(partial))
        assert len(set(said)) == 1
        assert said[0].startswith("DiskFull: The disk ran full while")
        store.abandon(2)
        filler.unlink()
        assert store.newest_complete().path == first
        # The ranks are fit to save again.
        assert ranks.run(TP2, run_save_into, tiny_model, str(store.begin(2))) == ["", ""]
        second = store.commit(2, {}, {})

        # And a damaged shard of the newest sends the run to the one before.
        shard = second / "actor" / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        found = CheckpointStore(where, keep=2).resume("auto")
        assert found is not None and found.path == first
        said_and_lr = ranks.run(TP2, run_load_with, tiny_model, {}, str(found.path))
        assert {said for said, _ in said_and_lr} == {""}


def run_exchanges(layout, platform, model, folder):
    """Whether ranks exchange the plans of a load, and wait for what others read, over gloo."""
    actor = build(layout, platform, model)
    save_model(actor, folder)
    groups = []

    def exchange(group, *given):
        groups.append(group)
        return _DistWrapper(group, *given)

    with mock.patch("torch.distributed.checkpoint.state_dict_loader._DistWrapper", exchange):
        load_model(actor, folder)
    return [group is background_group() for group in groups]


def test_ranks_that_read_at_different_speeds_wait_over_gloo(ranks, tiny_model, tmp_path):
    """NCCL would end the first after 600 s."""
    assert ranks.run(DP2, run_exchanges, tiny_model, str(tmp_path)) == [[True]] * 2


def run_unsaveable(layout, platform, model, which):
    """Error of a rank's start when a stage describes one part of two of something.

    Args:
        which: The model with that stage: ``actor``, ``value`` or ``none``, which is not trained.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.models.gpt import GPTModel

    described = GPTModel.sharded_state_dict

    def with_half(stage, *args, **kwargs):
        found = described(stage, *args, **kwargs)
        if which == "value" and not isinstance(stage.output_layer, ValueHead):
            return found
        return found | {"half": ShardedObject("half", torch.zeros(1), (2,), (0,))}

    worker = ActorWorker.__new__(ActorWorker)
    worker.rank = 0
    settings = ActorSettings(
        model_path=model,
        model=ModelSettings(torch.float32),
        optimizer=None if which == "none" else OptimizerConfig(),
        temperature=1.0,
        max_tokens_per_microbatch=64,
        max_sequence_length=64,
    )
    if which == "value":
        settings = dataclasses.replace(settings, value=settings)
    with (
        mock.patch.object(parallel, "initialize", lambda *_, **__: None),  # It is a rank already.
        mock.patch.object(Stops, "connect", lambda *_: None),
        mock.patch.object(GPTModel, "sharded_state_dict", with_half),
    ):
        try:
            worker.start(settings, layout, "cpu", ("127.0.0.1", 0), 0, 1)
        except Exception as error:
            return str(error)
    return "started"


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("actor", "1 ShardedObject are missing"),
        ("value", "1 ShardedObject are missing"),
        ("none", "started"),
    ],
)
def test_unsaveable_stages_are_refused_at_the_start(ranks, tiny_model, which, says):
    (said,) = ranks.run(Layout(1, 1, 1), run_unsaveable, tiny_model, which)
    assert says in said
