"""Runs whose steps are made here and written as the training loop writes them."""

from __future__ import annotations

import torch

from rlmath.algorithms.advantages import sequence_advantages, token_advantages
from rlmath.algorithms.ragged import repeat
from rlmath.batching.from_groups import SampleRewards, estimator_rewards, sampled_sequences
from rlmath.checks import attempts
from rlmath.config.load import load
from rlmath.monitor import open_monitor
from rlmath.monitor.digests import sample_key
from rlmath.training.algorithm_settings import advantage_settings
from rlmath.training.digests import digest_gradient, digest_sequences, digest_start, digest_weights
from rlmath.training.step_batch import StepBatch
from rlmath.weights.fingerprint import fingerprints
from rlmath.weights.gather import WeightChanges
from rlmath.weights.sequence_fingerprints import SequenceFingerprints
from tests.unit.commands.report.run_maker import group

STEPS = 3


class Run:
    """A run whose steps are made here and written as the loop writes them.

    Attributes:
        weights: By tensor; each step adds 1 to all of them.
        copies: Copies of the weights on further ranks.
    """

    def __init__(self, folder, *overrides):
        self.config = load(
            [
                *("experiment=quickstart", "runner.token_samples=1", f"runner.run_dir={folder}"),
                *overrides,
            ]
        )
        self.folder = folder
        self.weights = {f"layer.{i}.weight": torch.full((4, 3), float(i)) for i in range(3)}
        self.copies: list[dict[str, torch.Tensor]] = []

    def weights_changes(self):
        held = (self.weights, *self.copies)
        return [WeightChanges(dict(fingerprints(one.items())), None) for one in held]

    def groups(self, step):
        return [group(f"train.jsonl:{step}{i}", [1.0, -1.0], ["2", "3"], step) for i in range(3)]

    def old_log_probs(self, step, tokens):
        return torch.linspace(-1, -step, tokens)

    def of_teacher(self, step, tokens):
        return {}

    def gradient(self, step):
        return [{"grad_norm": 0.5 + step, "loss": 0.1}, {"grad_norm": 0.25, "loss": 0.2}]

    def gradients(self, step):
        return {name: (100 * step + place) << 40 for place, name in enumerate(self.weights)}

    def update(self, step):
        for tensor in self.weights.values():
            tensor += 1

    def dropped_groups(self, step):
        return {}

    def trained_groups(self, step):
        return [one for one in self.groups(step) if one.problem.id not in self.dropped_groups(step)]

    def train_on(self, monitor, step, groups):
        """As the driver and the ranks do it."""
        algorithm = self.config.algorithm
        sequences = sampled_sequences(
            groups, truncated=algorithm.truncated, mask_duplicates=algorithm.filter.mask_duplicates
        )
        lengths = sequences.response_lengths
        weights = {"math": self.config.reward.items[0].weight}
        rewards = SampleRewards.of(groups, weights)
        settings = advantage_settings(self.config, weights)
        advantages = sequence_advantages(
            estimator_rewards(rewards, settings),
            sequences.group_ids,
            sequences.loss_token_counts,
            settings,
        )
        values = self.of_teacher(step, int(lengths.sum())) | {
            "old_log_probs": self.old_log_probs(step, int(lengths.sum())),
            "advantages": token_advantages(
                advantages, lengths, repeat(sequences.takes_part, lengths)
            ),
        }
        found = SequenceFingerprints.of(torch.arange(len(lengths)), lengths, values)
        keys = tuple(sample_key(one) for one in sequences.samples)
        batch = StepBatch(sequences, keys, sequences.takes_part, rewards, step - 1)
        digest_sequences(monitor.digests, batch, found)

    def go(self, first=1, last=STEPS, resumed=False):
        """The steps ``first`` to ``last``; as a resume, or as a run that starts over."""
        after = first - 1 if resumed else None
        self.folder.mkdir(exist_ok=True)
        attempts.record(self.config, after_step=after or 0)
        with open_monitor(self.folder, self.config.runner, STEPS, after) as monitor:
            monitor.show_settings("", attempts.flat_settings(self.config))
            for step in range(first, last + 1):
                groups = self.groups(step)
                monitor.log_samples(step, groups, dropped=self.dropped_groups(step))
                self.train_on(monitor, step, self.trained_groups(step))
                digest_start(monitor, self)
                digest_gradient(monitor.digests, self.gradient(step), self.gradients(step))
                self.update(step)
                digest_weights(monitor, self)
                monitor.log_step(step, {})
        return self
