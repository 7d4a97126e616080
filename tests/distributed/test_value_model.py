"""The value model on real gloo ranks: right against Hugging Face, and the same on every layout."""

import dataclasses

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.settings import ActorSettings
from rlmath.actor.step_probe import NO_SHARE
from rlmath.actor.value import ValueModel
from rlmath.actor.worker import ActorWorker
from rlmath.batching.shards import response_rows
from rlmath.config.optimizer import OptimizerConfig
from rlmath.model.parallel import Layout
from tests.support.actors import build as build_policy
from tests.support.actors import make_batch, on_layouts

HIDDEN = 64
UPDATE = StepPlan(value_clip=0.5, minibatches=2)


def build(layout, platform, model, share_prompts=False):
    settings = ActorSettings(
        model_path=model,
        model=ModelSettings(torch.float32, sequence_parallel=True),
        optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-5),
        temperature=1.0,
        max_tokens_per_microbatch=64,
        max_tokens_per_forward=None if layout.world_size == 1 else 160,
        max_sequence_length=64,
        share_prompts=share_prompts,
    )
    return ValueModel(settings, layout, platform)


def head_weight():
    return torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5))


def run(layout, platform, model, batch, folder):
    """Values under a known head, metrics of an update, and of one after a checkpoint."""
    value_model = build(layout, platform, model)
    last = value_model.chunks[-1]
    if last.post_process:
        with torch.no_grad():
            last.output_layer.weight.copy_(head_weight())
    value_model.optimizer.reload_model_params()
    shard = value_model.shard_of(batch)
    found = value_model.shard_values(shard)
    assert (found is None) != value_model.is_last_stage
    rows = response_rows(shard.places, batch.response_lengths)
    values = (rows, found) if value_model.reports else None
    first = value_model.update(batch, UPDATE, seed=0)
    if folder is None:
        return values, first, value_model.update(batch, UPDATE, seed=1)
    from rlmath.checkpoint.state import load_model, save_model

    save_model(value_model, folder, "value_model")
    other = build(layout, platform, model)
    load_model(other, folder, "value_model")
    return values, first, other.update(batch, UPDATE, seed=1)


@pytest.fixture(scope="module")
def batch():
    one = make_batch()
    generator = torch.Generator().manual_seed(3)
    total = one.advantages.numel()
    return dataclasses.replace(
        one,
        values=torch.randn(total, generator=generator),
        returns=5 * torch.randn(total, generator=generator),
    )


@pytest.fixture(scope="module")
def expected_values(tiny_model, batch):
    """``[R]`` values from transformers' hidden states, one sequence at a time."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_model, dtype=torch.float32).eval()
    values = []
    tokens = batch.tokens.split(batch.sequence_lengths.tolist())
    for one, prompt in zip(tokens, batch.prompt_lengths.tolist(), strict=True):
        with torch.no_grad():
            hidden = model(one[None]).last_hidden_state[0]
        values.append((hidden @ head_weight()[0])[prompt - 1 : -1])
    return torch.cat(values)


def together(results, total):
    shares = [values for values, _, _ in results if values is not None]
    placed = torch.full((total,), torch.nan)
    for rows, values in shares:
        placed[rows] = values
    return placed


@pytest.fixture(scope="module")
def alone(ranks, tiny_model, batch):
    return ranks.run(Layout(1, 1, 1), run, tiny_model, batch, None)[0]


@on_layouts()
def test_values_and_updates_are_the_same_on_every_layout(
    layout, ranks, tiny_model, batch, expected_values, alone, tmp_path
):
    """The second update, on all layouts but the first, is made by a model from a checkpoint."""
    folder = None if layout.world_size == 1 else str(tmp_path)
    results = ranks.run(layout, run, tiny_model, batch, folder)
    torch.testing.assert_close(
        together(results, expected_values.numel()), expected_values, rtol=2e-5, atol=2e-5
    )
    for _, first, second in results:
        for found, wanted in zip(first + second, alone[1] + alone[2], strict=True):
            assert found == pytest.approx(wanted, rel=2e-5)


def run_worker(layout, platform, model, batch, folder, save):
    """The worker's own save in the background, with training continuing, or its load."""
    worker = ActorWorker.__new__(ActorWorker)
    worker._peaks = {}
    worker.actor = build_policy(layout, platform, model)
    worker.value_model = build(layout, platform, model)
    worker.platform = platform
    if not save:
        worker.load_checkpoint(folder)
        return step(worker, batch, seed=1)
    step(worker, batch, seed=0)
    worker.save_checkpoint(folder, in_background=True)
    # Changes both models while their checkpoint may still be on its way to the disk.
    metrics = step(worker, batch, seed=1)
    worker.finish_checkpoint()
    assert worker.checkpoint_written()
    return metrics


def step(worker, batch, seed):
    plan = StepPlan(passes=("old", "values"), minibatches=2, value_clip=0.5)
    worker.run_part(worker.value_model.shard_of(batch, plan, seed), plan)
    report = worker.finish_step(plan, None)
    if report.values is None or report.policy is None:
        return []
    return [*report.policy.minibatches, *report.values.minibatches]


def test_a_background_checkpoint_has_the_value_model_and_resumes(
    ranks, tiny_model, batch, tmp_path
):
    """The update after the resume has the same numbers as the one that followed the save."""
    for layout, folder in ((Layout(2, 1, 1), tmp_path / "tp"), (Layout(1, 1, 2), tmp_path / "dp")):
        folder.mkdir()
        saved = ranks.run(layout, run_worker, tiny_model, batch, str(folder), True)
        assert sorted(path.name for path in folder.iterdir()) == ["actor", "value_model"]
        resumed = ranks.run(layout, run_worker, tiny_model, batch, str(folder), False)
        assert resumed == saved
        assert all(metrics["grad_norm"] > 0 for metrics in resumed[0])


def learn(layout, platform, model, batch):
    value_model = build(layout, platform, model)
    settings = StepPlan(value_clip=None)
    losses = []
    for step in range(15):
        (metrics,) = value_model.update(batch, settings, seed=step)
        losses.append(metrics["loss"])
        # The head is 0 at first, though these values are not; below it there is no gradient then.
        found = value_model.step_findings
        assert step == 0 or not any(one.kind for _, one in found), found
    # The step checks know a matrix without a gradient, and the embedding.
    assert value_model.gradient_shares is not None
    name, matrix = value_model.gradient_shares.layers[0]
    embedding = value_model.chunks[0].embedding.word_embeddings.weight
    for place, one in ((name, matrix), ("word_embeddings", embedding)):
        handle = one.register_hook(torch.zeros_like)
        value_model.update(batch, settings, seed=99)
        ((_, finding),) = value_model.step_findings
        assert finding.kind == NO_SHARE and place in finding.place, finding
        handle.remove()
    return losses


def test_the_value_model_learns_its_returns(ranks, tiny_model, batch):
    """From 0, where the loss is half the mean square of the returns."""
    (losses,) = ranks.run(Layout(1, 1, 1), learn, tiny_model, batch)
    at_first = 0.5 * batch.returns[batch.loss_mask].double().square().mean()
    assert losses[0] == pytest.approx(float(at_first), rel=1e-5)
    assert losses[-1] < 0.85 * losses[0]
