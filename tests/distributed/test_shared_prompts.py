import dataclasses

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.actor.observer import UpdateObserver, Vector, gradient_of
from rlmath.actor.plan import StepPlan
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import response_rows
from rlmath.model.parallel import Layout
from tests.distributed.test_value_model import build as build_value_model
from tests.support.actors import build, make_batch


def grouped_batch():
    """Groups of four, one of them too large for a micro-batch; a prompt of one token; two groups
    with one prompt; one with two prompts of one length; and one of one sequence."""
    batch = make_batch(17, seed=3)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 101, (size,), generator=generator) for size in (9, 7, 1, 7)]
    of_sequences = [0] * 4 + [1] * 4 + [2] * 2 + [1] * 2 + [1, 3, 3, 1] + [3]
    groups = [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2 + [4] * 4 + [5]
    ends = batch.sequence_lengths.cumsum(0)
    parts = []
    for place, prompt in enumerate(of_sequences):
        end, response = int(ends[place]), int(batch.response_lengths[place])
        parts += [prompts[prompt], batch.tokens[end - response : end]]
    return dataclasses.replace(
        batch,
        tokens=torch.cat(parts),
        prompt_lengths=torch.tensor([len(prompts[prompt]) for prompt in of_sequences]),
        group_ids=torch.tensor(groups),
    )


class Gradients(UpdateObserver):
    """Keeps the gradient of each minibatch."""

    def __init__(self):
        super().__init__()
        self.kept: list[Vector] = []

    def record_gradient(self, optimizer):
        self.kept.append(gradient_of(optimizer))


def run(layout, platform, model, batch, changes):
    """Without and with shared prompts: rows of the passes, log-probs, entropies, gradients, values
    of a value model, and by how much the first minibatch's log-probs are not the old ones."""
    found = []
    for share in (False, True):
        settings = ModelSettings(torch.float32, sequence_parallel=True, **changes)
        # Adam would make much of the rounding of small gradients.
        slow = {"lr": 1e-12}
        actor = build(layout, platform, model, model=settings, share_prompts=share, optimizer=slow)
        shard = actor.shard_of(batch, UPDATE, seed=0)
        rows = sum(one.tokens.size(1) for one in actor.micro_batches(shard.whole()))
        values = actor.shard_log_probs(shard)
        log_probs, entropies = torch.zeros(0), torch.zeros(0)
        old, off = torch.zeros(shard.batch.loss_mask.numel()), 0.0
        order = response_rows(shard.places, batch.response_lengths).argsort()
        if values is not None:
            old[values.response_rows] = values.log_probs
            log_probs, entropies = old[order], torch.zeros_like(old)
            entropies[values.response_rows] = values.entropy
            entropies = entropies[order]
        actor.observer = observer = Gradients()
        result = actor.update_shard(shard.with_values(old_log_probs=old), UPDATE)
        if result.first is not None:
            off = float((result.first.log_probs - old[result.first.response_rows]).abs().max())
        value_model = value_model_of(layout, platform, model, share)
        estimates = value_model.shard_values(shard)
        estimates = torch.zeros(0) if estimates is None else estimates[order]
        found.append((rows, log_probs, entropies, observer.kept, estimates, off))
    return found


UPDATE = StepPlan(ObjectiveSettings(entropy_coef=0.01), minibatches=2)


def value_model_of(layout, platform, model, share):
    value_model = build_value_model(layout, platform, model, share)
    last = value_model.chunks[-1]
    if last.post_process:
        with torch.no_grad():
            last.output_layer.weight.fill_(0.1)
    return value_model


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(1, 1, 1), {"recompute": "full", "logits": "chunked"}),
        (Layout(2, 1, 2), {}),
        (Layout(1, 2, 1), {}),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_whole_sequences(ranks, request, layout, changes):
    model, batch = request.getfixturevalue("tiny_model"), grouped_batch()
    everywhere = ranks.run(layout, run, model, batch, changes)
    usual_rows, shared_rows = (sum(one[i][0] for one in everywhere) for i in (0, 1))
    assert shared_rows < 0.9 * usual_rows
    for usual, shared in everywhere:
        assert usual[5] == shared[5] == 0.0
        if layout.data_parallel > 1:
            continue  # Ranks have other sequences; the gradients say that all are there.
        for index in (1, 2, 4):
            torch.testing.assert_close(shared[index], usual[index], rtol=2e-6, atol=2e-6)
    for usual, shared in everywhere:
        assert len(usual[3]) == len(shared[3]) == 2
        for a, b in zip(usual[3], shared[3], strict=True):
            for expected, own in zip(a, b, strict=True):
                for one, other in zip(expected, own, strict=True):
                    largest = float(one.abs().max())
                    assert float((one - other).abs().max()) <= 3e-6 * largest


def build_sharing(layout, platform, model):
    build(layout, platform, model, share_prompts=True)


def test_ranks_refuse_it_where_attention_would_not_find_the_prompt(ranks, request):
    model = request.getfixturevalue("tiny_model")
    with pytest.raises(RuntimeError, match=r"share_prompts: actor\.context_parallel=2"):
        ranks.run(Layout(1, 1, 1, context_parallel=2), build_sharing, model)
