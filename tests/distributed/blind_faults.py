"""Faults that were planned from the loop and the actor alone, without a look at the step checks.

    python -m tests.distributed.blind_faults [NAME ...]

Plants each after one healthy step of a tiny model, and prints what the checks of the next step say.
docs/reliability.md has the first count; two more of the plan lie in the driver's sampler, which has
no part here: a group filter that keeps the groups with equal rewards, and a data stream that gives
the first problems again in every step.
"""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlmath.actor import policy, policy_loss, rank_step
from rlmath.actor.parallel import destroy, initialize
from rlmath.algorithms.correction import CorrectionConfig
from rlmath.algorithms.losses import LOSSES
from rlmath.checkpoint.optimizer_state import optimizer_parts
from rlmath.config.schema import DType
from rlmath.device import CPU
from rlmath.model.parallel import Layout
from tests.distributed.healthy_steps import run, write_model
from tests.distributed.rank_pool import _free_port


def clip_ten_times_as_wide(worker):
    original = policy_loss.policy_objective

    def wide(inputs, settings):
        options = LOSSES.options(settings.loss)()
        names = [f.name for f in dataclasses.fields(options) if f.name.startswith("clip")]
        own = {n: min(1.0, 10 * (getattr(options, n) or 0.0)) for n in names[:2]}
        options = dataclasses.replace(options, **own)
        return original(inputs, dataclasses.replace(settings, options=options))

    policy_loss.policy_objective = wide


def current_policy_as_old(worker):
    """From the second minibatch on, the ratio is 1 by construction."""
    backward, calls = worker.actor._backward, iter(range(10**6))

    def without(share, *rest, **options):
        if next(calls) % 2:
            share = dataclasses.replace(
                share, batch=dataclasses.replace(share.batch, old_log_probs=None)
            )
        return backward(share, *rest, **options)

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

    def packed(share):
        return [
            dataclasses.replace(one, position_ids=torch.arange(one.tokens.size(1))[None])
            for one in pack(share)
        ]

    def going_on(*given, **options):
        worker.actor.micro_batches = packed
        try:
            return backward(*given, **options)
        finally:
            worker.actor.micro_batches = pack

    worker.actor._backward = going_on


def loss_over_micro_batches(worker):
    """The loss that goes back is divided by the number of micro-batches, and what is reported is
    not."""
    original = policy.policy_loss

    def divided(*given):
        objective = original(*given)

        def of(*inputs):
            loss, kept = objective(*inputs)
            return loss / 4, kept

        return of

    policy.policy_loss = divided


FAULTS: tuple[Callable[[Any], None], ...] = (
    clip_ten_times_as_wide,
    current_policy_as_old,
    reference_is_the_policy,
    correction_upside_down,
    decay_on_norms,
    no_clipping,
    positions_go_on,
    loss_over_micro_batches,
)


def main():
    (name,) = sys.argv[1:]
    fault = next(one for one in FAULTS if one.__name__ == name)
    CPU.prepare_megatron_process(0, num_threads=1)
    initialize(Layout(1, 1, 1), CPU, 0, "127.0.0.1", _free_port(), seed=0)
    correction = CorrectionConfig("token_truncate")
    more = {"correction": correction} if fault is correction_upside_down else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), "Qwen2.5-0.5B")
            terms = fault is reference_is_the_policy
            said = run(
                folder, DType.float32, 3, lora=False, terms=terms, plant=fault, more_plan=more
            )
    finally:
        destroy()
    print(f"RESULT {name}: {said[0] if said else 'no check said anything'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
