"""Supervised fine-tuning on worked examples: the light warm start before reinforcement learning.

The same actor, packing and update as in training: an example is a sequence whose response has
advantage 1, and the loss is ``reinforce``, whose value is then the negative log-likelihood of the
responses, averaged over all their tokens. Prompts are read and not learned.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from rlmath.actor.group import ActorGroup
from rlmath.actor.plan import StepPlan
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.checkpoint import CheckpointStore
from rlmath.checkpoint.mirror import mirroring
from rlmath.checks.attempts import forget_export, note_export
from rlmath.checks.prompt_style import with_prompt_style
from rlmath.config.load import save
from rlmath.config.schema import Config
from rlmath.config.sft import SftConfig
from rlmath.data import Example, ProblemStream, load_examples, load_tokenizer
from rlmath.data.prompt_report import too_few
from rlmath.errors import UserError
from rlmath.model.spec import read_model_spec
from rlmath.monitor import Monitor, open_monitor
from rlmath.monitor.run_folder import SFT_LOG
from rlmath.monitor.run_settings import SFT_CONFIG_FILE
from rlmath.training.checkpointing import open_saver
from rlmath.training.export_rehearsal import rehearse_export
from rlmath.training.grace import grace_of
from rlmath.training.opening import open_ranks, with_model_folder
from rlmath.training.rank_settings import fine_tuned_ranks
from rlmath.training.resumed_model import check_resumed_weights
from rlmath.types import TrainingBatch
from rlmath.utils.ending_signals import signals_wait
from rlmath.utils.run_lock import only_run_in

log = logging.getLogger(__name__)

# In a row. One batch may overflow; after several, so will the rest.
_MOST_DISCARDED = 3


def run(config: Config) -> int:
    """Fine-tune and leave a Hugging Face folder in ``run_dir/sft``. Returns the exit code."""
    runner = config.runner
    with (
        only_run_in(runner.run_dir),
        mirroring(runner.run_dir, runner.mirror, runner.mirror_wait_s),
    ):
        return fine_tune(config)


def fine_tune(config: Config) -> int:
    """:func:`run` in a folder that is ours alone."""
    config = with_prompt_style(with_model_folder(config), "sft")
    run_dir, sft = Path(config.runner.run_dir), config.sft
    stream = load_stream(config)
    store = CheckpointStore(run_dir / "sft_checkpoints", keep=config.runner.keep_checkpoints)
    checkpoint = None
    if sft.save_every:
        checkpoint = store.resume(
            config.runner.resume, lambda found: check_resumed_weights(config, found.path)
        )
    done = 0 if checkpoint is None else checkpoint.step
    with (
        open_ranks(config, fine_tuned_ranks) as run,
        # Steps of a fraction of a second: a dozen lines say enough.
        open_monitor(
            run_dir / SFT_LOG,
            config.runner,
            sft.steps,
            done or None,
            line_every=max(1, sft.steps // 12),
        ) as monitor,
        open_saver(store, run, {"stream": stream}) as saver,
        saver.saving_when_cut_short() if sft.save_every else contextlib.nullcontext(),
        grace_of(config, run.actor) as grace,
    ):
        if checkpoint is not None:
            saver.restore(checkpoint, None)
        forget_export(run_dir, "sft")
        discarded = DiscardedSteps()
        monitor.begin_step()
        for step in range(done + 1, sft.steps + 1):
            figures = fine_tuning_step(run.actor, stream, sft, monitor, step, discarded)
            if step == done + 1:
                save(config, run_dir / SFT_CONFIG_FILE)
            saver.step_done(step, figures)
            grace.step_done()
            if sft.save_every and (step % sft.save_every == 0 or step == sft.steps):
                with monitor.phase("save"), signals_wait("a save"):
                    saver.save()
        with signals_wait("a save"):
            saver.poll(wait=True)
        adapters = run_dir / "sft_adapter" if config.actor.lora.rank else None
        run.actor.save_hf(run_dir / "sft", adapters)
    note_export(run_dir, sft.steps, "sft")
    print(f"fine-tuned model: {run_dir / 'sft'}")
    return 0


def load_stream(config: Config) -> ProblemStream[Example]:
    tokenizer = load_tokenizer(config.model.path)
    rehearse_export(config.model.path)
    examples, report = load_examples(
        config.sft.train_paths,
        config.data,
        config.sft.response_key,
        tokenizer,
        read_model_spec(config.model.path).max_positions,
    )
    print("data     worked examples:", report.describe(config.data.max_prompt_tokens), flush=True)
    per_step = config.sft.sequences_per_step
    few = too_few("worked examples", len(examples), "sft.sequences_per_step", per_step)
    print("\n".join([*report.prompt_lines(), *few]), flush=True)
    return ProblemStream(examples, seed=config.data.seed)


def fine_tuning_step(
    actor: ActorGroup,
    stream: ProblemStream[Example],
    sft: SftConfig,
    monitor: Monitor,
    step: int,
    discarded: DiscardedSteps,
) -> dict[str, float]:
    """Update from the next examples, and log it; returns the step's metrics."""
    with monitor.phase("update"):
        batch = batch_of(stream.next(sft.sequences_per_step))
        plan = StepPlan(ObjectiveSettings(loss="reinforce"), seed=step)
        actor.run_part(batch, plan)
        result = actor.finish_step(plan).policy
    assert result is not None
    (metrics,) = result.minibatches
    monitor.count_tokens(batch.tokens.numel())
    figures = {
        "sft/loss": metrics["policy_loss"],
        "sft/perplexity": math.exp(metrics["policy_loss"]),
        "sft/entropy": metrics["entropy"],
        "sft/grad_norm": metrics["grad_norm"],
        "sft/lr": metrics["lr"],
        "sft/discarded": metrics["discarded"],
    }
    # Written down before it is saved: a checkpoint has all of its steps' metrics.
    monitor.log_step(step, figures)
    for reason in result.early_stopped.values():
        monitor.warn(f"step {step}: changed no weight: {reason}")
    discarded.update(step, next(iter(result.early_stopped.values()), ""))
    return figures


class DiscardedSteps:
    """Steps in a row whose loss or gradient was not finite, so that they changed no weight."""

    def __init__(self) -> None:
        self._count = 0

    def update(self, step: int, reason: str) -> None:
        """Note a step. ``reason``: why it was discarded; empty: it was not. Raises UserError: the
        last few all were."""
        self._count = self._count + 1 if reason else 0
        if self._count < _MOST_DISCARDED:
            return
        first = step - self._count + 1
        cause = (
            "model.path may hold weights that are not finite (rlmath sft ... --check reads them), "
            "or model.dtype may be too narrow"
            if first == 1
            else "use a smaller sft.optimizer.lr or more sft.optimizer.warmup_steps, and start "
            "over with runner.resume=never"
        )
        raise UserError(
            f"steps {first} to {step} changed no weight: {reason}. No model is written; {cause}"
        )


def batch_of(examples: Sequence[Example]) -> TrainingBatch:
    """Examples laid end to end, with advantage 1 for each response token."""
    sequences = [(e.prompt_token_ids, e.response_token_ids) for e in examples]
    return batch_of_sequences(sequences, advantage=1.0)
