"""Faults that were planned without a look at the step checks, four times.

    python -m tests.distributed.blind_faults [NAME ...]

Plants each after one healthy step of a tiny model, and prints what the checks of the next steps
say. docs/records/step_checks.md has the counts. Two more of the first plan lie in the driver's
sampler, which has no part here: a group filter that keeps the groups with equal rewards, and a data
stream that gives the first problems again in every step.
"""

import contextlib
import dataclasses
import sys

import torch

from rlmath.actor import logprobs, policy, policy_loss, rank_step
from rlmath.checkpoint.optimizer_state import optimizer_parts
from tests.distributed import healthy_steps
from tests.distributed.rank_pool import RankPool


def clip_ten_times_as_wide(worker):
    original = policy_loss.policy_objective

    def wide(inputs, settings):
        options = settings.loss_options
        names = [f.name for f in dataclasses.fields(options) if f.name.startswith("clip")]
        own = {n: min(1.0, 10 * (getattr(options, n) or 0.0)) for n in names[:2]}
        options = dataclasses.replace(options, **own)
        return original(inputs, dataclasses.replace(settings, options=options))

    policy_loss.policy_objective = wide


def current_policy_as_old(worker):
    """From the second minibatch on, the ratio is 1 by construction."""
    backward = worker.actor._backward

    def without(share, plan, begin, *rest):
        if begin:
            share = dataclasses.replace(
                share, batch=dataclasses.replace(share.batch, old_log_probs=None)
            )
        return backward(share, plan, begin, *rest)

    worker.actor._backward = without


def reference_is_the_policy(worker):
    worker.actor.reference_weights = contextlib.nullcontext


def correction_upside_down(worker):
    original = rank_step.correct
    rank_step.correct = lambda old, engine, *rest: original(engine, old, *rest)


def decay_on_norms(worker):
    for group in worker.actor.optimizer.param_groups:
        group["wd_mult"] = 1.0


def no_clipping(worker):
    for part in optimizer_parts(worker.actor.optimizer):
        part.config.clip_grad = 0.0


def positions_go_on(worker):
    """In the update alone, positions do not begin again with each packed sequence."""
    backward, pack = worker.actor._backward, worker.actor.micro_batches

    def pack_on(share):
        return [
            dataclasses.replace(one, position_ids=torch.arange(one.tokens.size(1))[None])
            for one in pack(share)
        ]

    def going_on(*given, **options):
        worker.actor.micro_batches = pack_on
        try:
            return backward(*given, **options)
        finally:
            worker.actor.micro_batches = pack

    worker.actor._backward = going_on


def loss_over_micro_batches(worker):
    """The loss that goes back is divided by the number of micro-batches, and what is reported is
    not."""
    original = policy.policy_loss

    def divide(*given):
        objective = original(*given)

        def of(*inputs):
            loss, kept = objective(*inputs)
            return loss / 4, kept

        return of

    policy.policy_loss = divide


# -- the second plan ----------------------------------------------------------------------------


def gradients_are_not_cleared(worker):
    worker.actor.clear_gradients = lambda: None


def last_token_is_not_in_the_loss(worker):
    """Each response loses its last token, which often is the end of the sequence."""
    shard_of = worker.actor.shard_of

    def losing(*given):
        shard = shard_of(*given)
        mask = shard.batch.loss_mask.clone()
        mask[shard.batch.response_lengths.cumsum(0) - 1] = False
        return shard.with_values(loss_mask=mask)

    worker.actor.shard_of = losing


def of_next_sequences(values, lengths):
    """Values of each sequence's tokens from the next sequence, as far as it goes."""
    parts = values.split(lengths.tolist())
    pairs = zip(parts, (*parts[1:], parts[0]), strict=True)
    return torch.cat([torch.cat([b[: len(a)], a[len(b) :]]) for a, b in pairs])


def old_log_probs_of_another_sequence(worker):
    """From the second minibatch on."""
    backward = worker.actor._backward

    def swap(share, plan, begin, *rest):
        if begin:
            batch = share.batch
            old = of_next_sequences(batch.old_log_probs, batch.response_lengths)
            share = dataclasses.replace(share, batch=dataclasses.replace(batch, old_log_probs=old))
        return backward(share, plan, begin, *rest)

    worker.actor._backward = swap


def reference_log_probs_of_another_sequence(worker):
    log_probs = worker.actor.shard_log_probs

    def swap(shard, name="policy", seed=0):
        found = log_probs(shard, name, seed)
        if name != "reference":
            return found
        values = of_next_sequences(found.log_probs, shard.batch.response_lengths)
        return dataclasses.replace(found, log_probs=values)

    worker.actor.shard_log_probs = swap


def betas_exchanged(worker):
    for part in optimizer_parts(worker.actor.optimizer):
        for group in part.optimizer.param_groups:
            group["betas"] = group["betas"][::-1]


def main_parameters_rounded(worker):
    """After each step the float32 main parameters are the bfloat16 ones."""
    finish = worker.actor.finish_minibatch

    @torch.no_grad()
    def rounding(discard):
        lr = finish(discard)
        for part in optimizer_parts(worker.actor.optimizer):
            for group in part.optimizer.param_groups:
                for one in group["params"]:
                    one.copy_(one.bfloat16().float())
        return lr

    worker.actor.finish_minibatch = rounding


def clip_by_a_part_of_the_norm(worker):
    optimizer = worker.actor.optimizer
    step = optimizer.step

    def stepping():
        owners = [optimizer, *optimizer_parts(optimizer)]
        originals = [one.get_grad_norm for one in owners]
        for one, original in zip(owners, originals, strict=True):
            one.get_grad_norm = lambda *x, original=original: 0.5 * original(*x)
        try:
            return step()
        finally:
            for one in owners:
                del one.get_grad_norm

    optimizer.step = stepping


def least_objective_becomes_largest(worker):
    """``min(r A, clip(r) A)`` is a maximum."""

    class Swapped:
        maximum = staticmethod(torch.minimum)

    # The package has a function of the module's name.
    module = sys.modules["rlmath.algorithms.losses.ppo_clip"]
    module.torch = Swapped


def first_minibatch_twice(worker):
    from rlmath.batching.shards import Shard

    shares = Shard.shares

    def first_again(self):
        first, *others = shares(self)
        yield from (first, first, *others[1:])

    Shard.shares = first_again


def group_of_the_last_step(worker):
    """The driver gives a group of the step before in the place of one of this step."""
    original = healthy_steps.groups_of

    def again(config, step, lag):
        if step == 1:
            return original(config, step, lag)
        return [*original(config, step - 1, lag)[:1], *original(config, step, lag)[1:]]

    healthy_steps.groups_of = again


# -- the third plan -----------------------------------------------------------------------------


def half_of_each_sequence(worker):
    """The first half of each response has all of its weight."""
    backward = worker.actor._backward

    def first_half(weights):
        own = weights.clone()
        half = (len(own) + 1) // 2
        own[half:], own[:half] = 0.0, own[:half] * (len(own) / half)
        return own

    def move_weights(share, *rest, **options):
        parts = share.weights.split(share.batch.response_lengths.tolist())
        weights = torch.cat([first_half(one) for one in parts])
        return backward(dataclasses.replace(share, weights=weights), *rest, **options)

    worker.actor._backward = move_weights


def without_gradient(worker, ending, change=None):
    for name, one in worker.actor.module.named_parameters():
        if name.endswith(ending):
            one.register_hook(change or (lambda gradient: 0 * gradient))


def norms_without_gradient(worker):
    without_gradient(worker, "layernorm.weight")


def biases_without_gradient(worker):
    without_gradient(worker, "linear_qkv.bias")


def one_head_without_gradient(worker):
    """The first head's queries in each layer."""
    width = worker.actor.spec.head_dim

    def less(gradient):
        gradient = gradient.clone()
        gradient[:width] = 0
        return gradient

    without_gradient(worker, "linear_qkv.weight", less)


def embedding_at_twice_the_rate(worker):
    finish = worker.actor.finish_minibatch
    embedding = max(worker.actor.module.parameters(), key=lambda one: one.numel())

    @torch.no_grad()
    def finishing(discard):
        before = embedding.clone()
        lr = finish(discard)
        embedding.add_(embedding - before)
        return lr

    worker.actor.finish_minibatch = finishing


def large_epsilon(worker):
    for part in optimizer_parts(worker.actor.optimizer):
        for group in part.optimizer.param_groups:
            group["eps"] = 1e-3


def kl_without_gradient(worker):
    from rlmath.algorithms import objective

    original = objective.kl_estimate
    objective.kl_estimate = lambda *given: original(*given).detach()


def entropy_without_gradient(worker):
    original = policy_loss.policy_objective

    def detach_entropy(inputs, settings):
        return original(dataclasses.replace(inputs, entropy=inputs.entropy.detach()), settings)

    policy_loss.policy_objective = detach_entropy


def correction_is_lost(worker):
    """The correction is measured, and every factor is 1."""
    original = rank_step.correct

    def lose_correction(*given):
        found = original(*given)
        return dataclasses.replace(found, weights=torch.ones_like(found.weights))

    rank_step.correct = lose_correction


def micro_batch_twice(worker):
    """The first micro-batch of each minibatch goes back with twice its loss."""
    original = policy.policy_loss

    def run_twice(*given):
        objective, numbers = original(*given), iter(range(10**6))

        def of(*inputs):
            loss, kept = objective(*inputs)
            return (loss if next(numbers) else 2 * loss), kept

        return of

    policy.policy_loss = run_twice


# -- the fourth plan ----------------------------------------------------------------------------


def likelihood_without_its_normalizer(worker):
    """The gradient raises the token's logit and lowers no other."""

    def gradient(self, x, log_z, entropy, local, mine, grad_log_probs, grad_entropy):
        place = local.clamp(0, self.num_valid - 1)[:, None]
        own = torch.where(mine, grad_log_probs, 0.0)[:, None]
        return torch.zeros_like(x).scatter_(1, place, own) / self.temperature

    logprobs.VocabSlice.gradient = gradient


def first_layer(worker):
    return worker.actor.chunks[0].decoder.layers[0]


def dropout_in_training(worker):
    def drop(module, given, output):
        return torch.nn.functional.dropout(output[0], 0.1, module.training), *output[1:]

    first_layer(worker).register_forward_hook(drop)


def gradient_doubles_below_a_layer(worker):
    def doubling(module, given, output):
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: 2 * gradient)

    first_layer(worker).register_forward_hook(doubling)


def adam_counts_no_steps(worker):
    """Each step corrects the moments' bias as the first one does."""
    optimizer = worker.actor.optimizer
    step = optimizer.step

    def stepping():
        for part in optimizer_parts(optimizer):
            for state in part.optimizer.state.values():
                state["step"].zero_()
        return step()

    optimizer.step = stepping


def advantages_fade(worker):
    """From twice as much at a response's first token to nothing at its last one."""
    backward = worker.actor._backward

    def fading(share, *rest, **options):
        batch = share.batch
        ramp = [torch.linspace(2, 0, n) for n in batch.response_lengths.tolist()]
        batch = dataclasses.replace(batch, advantages=batch.advantages * torch.cat(ramp))
        return backward(dataclasses.replace(share, batch=batch), *rest, **options)

    worker.actor._backward = fading


def gradients_in_bfloat16(worker):
    norm = worker.actor.gradient_norm

    def rounding():
        for one in worker.actor.module.parameters():
            one.main_grad.copy_(one.main_grad.bfloat16().float())
        return norm()

    worker.actor.gradient_norm = rounding


def k1_in_the_loss(worker):
    from rlmath.algorithms import objective

    original = objective.kl_estimate
    objective.kl_estimate = lambda name, *given: original("k1", *given)


def tokens_of_low_entropy(worker):
    original = rank_step.top_entropy_mask
    rank_step.top_entropy_mask = lambda entropy, *given: original(-entropy, *given)


def sequence_ratios_of_the_pack(worker):
    """All sequences of a micro-batch have one ratio."""
    from rlmath.algorithms.losses import LossInputs

    original = LossInputs.sequence_mean

    def of_all(self, values):
        ids = torch.zeros_like(self.sequence_ids)
        return original(dataclasses.replace(self, sequence_ids=ids, num_sequences=1), values)

    LossInputs.sequence_mean = of_all


def second_micro_batch_clears_the_first(worker):
    original = policy.policy_loss

    def clearing(*given):
        objective, numbers = original(*given), iter(range(10**6))

        def of(*inputs):
            if next(numbers) == 1:
                for one in worker.actor.module.parameters():
                    one.main_grad.zero_()
            return objective(*inputs)

        return of

    policy.policy_loss = clearing


PLAIN = ("quickstart", "actor.tensor_parallel=1")
# So narrow that ratios of the second minibatch leave it.
NARROW = tuple(f"algorithm.loss_options.clip_{end}=0.005" for end in ("low", "high"))
CLIPPED = (*PLAIN, *NARROW)
ROUNDED = (*PLAIN, "model.dtype=bfloat16")
WITH_ENTROPY = (*PLAIN, "algorithm.entropy_coef=0.01")
WITH_KL = (*PLAIN, "algorithm.kl_coef=0.05")
CORRECTED = (*PLAIN, "algorithm.correction.kind=token_truncate")
WITH_GSPO = (*CLIPPED, "algorithm.loss=gspo", "algorithm.aggregation=seq_mean_token_mean")
# By the settings that they need.
FIRST = {
    clip_ten_times_as_wide: CLIPPED,
    current_policy_as_old: PLAIN,
    reference_is_the_policy: WITH_KL,
    correction_upside_down: CORRECTED,
    decay_on_norms: (*PLAIN, "actor.optimizer.weight_decay=0.1"),
    no_clipping: PLAIN,
    positions_go_on: PLAIN,
    loss_over_micro_batches: PLAIN,
}
SECOND = {
    gradients_are_not_cleared: PLAIN,
    last_token_is_not_in_the_loss: PLAIN,
    old_log_probs_of_another_sequence: PLAIN,
    reference_log_probs_of_another_sequence: WITH_KL,
    betas_exchanged: PLAIN,
    main_parameters_rounded: ROUNDED,
    clip_by_a_part_of_the_norm: PLAIN,
    least_objective_becomes_largest: CLIPPED,
    first_minibatch_twice: PLAIN,
    group_of_the_last_step: PLAIN,
}
THIRD = {
    half_of_each_sequence: PLAIN,
    norms_without_gradient: PLAIN,
    biases_without_gradient: PLAIN,
    one_head_without_gradient: PLAIN,
    embedding_at_twice_the_rate: PLAIN,
    large_epsilon: PLAIN,
    kl_without_gradient: WITH_KL,
    entropy_without_gradient: WITH_ENTROPY,
    correction_is_lost: CORRECTED,
    micro_batch_twice: PLAIN,
}


FOURTH = {
    likelihood_without_its_normalizer: PLAIN,
    dropout_in_training: PLAIN,
    gradient_doubles_below_a_layer: PLAIN,
    adam_counts_no_steps: PLAIN,
    advantages_fade: PLAIN,
    gradients_in_bfloat16: PLAIN,
    k1_in_the_loss: WITH_KL,
    tokens_of_low_entropy: (*PLAIN, "algorithm.entropy_top_share=0.2"),
    sequence_ratios_of_the_pack: WITH_GSPO,
    # So small that a minibatch has a second one.
    second_micro_batch_clears_the_first: (*PLAIN, "actor.max_tokens_per_microbatch=128"),
}


def main():
    plans = FIRST | SECOND | THIRD | FOURTH
    faults = {one.__name__: (one, words) for one, words in plans.items()}
    for name in sys.argv[1:] or faults:
        fault, words = faults[name]
        pool = RankPool()  # Some faults stay in a process.
        if fault is group_of_the_last_step:
            fault(None)  # Checks see it as well.
        said = healthy_steps.run(pool, healthy_steps.Case(words=words), 3, fault)
        pool.close()
        print(f"| {name} | {said[0] if said else 'no check said anything'} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
