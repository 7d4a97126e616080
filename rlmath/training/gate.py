"""The gate: whether engine and actor are the same model, within the noise of its rounding.

Two correct programs give log-probs that differ by rounding, and how much depends on the model: in
bfloat16 the mean of exp|difference| of a healthy engine was 1.0002 for one model and 1.025 for
another. So the limit is no constant. The actor computes some of the step's log-probs again with
every activation rounded otherwise (``rlmath.actor.rounding_noise``), and the engine may be a few
times farther away than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.mismatch import HISTOGRAM_STEP, Mismatch, measure
from rlmath.algorithms.mismatch_causes import likely_cause
from rlmath.batching.shards import Sequences
from rlmath.config.actor import Fp8
from rlmath.config.schema import Config, DType
from rlmath.errors import UserError, WeightsError
from rlmath.model.precision import NOISE_FACTOR
from rlmath.model.spec import read_model_spec
from rlmath.rollout.weight_sync import compare_weights
from rlmath.training.algorithm_settings import engines_in_fp8
from rlmath.training.live_divergence import where_they_part
from rlmath.types import TrainingBatch

if TYPE_CHECKING:
    from rlmath.actor.group import ActorGroup
    from rlmath.training.opening import Running

# How many times the largest rounding noise of a token the largest difference may be, as
# NOISE_FACTOR is for the mean. Healthy engines were at most 1.8 times as far away, on an H100 0.9,
# but for single tokens of MoEs (REROUTED_SHARE). Fingerprints and the comparison of constants find
# the planted faults that are within the limits in bfloat16. Margins: docs/records/weights.md.
MAX_FACTOR = 3.0
# Least limits in float32, where kernels also differ in the order in which they add up.
FLOAT32_EXCESS = 1e-5
FLOAT32_MAX = 1e-3
PROBE_TOKENS = 8192
# The share of the tokens of an MoE that may be beyond the limits while all others are within: where
# two experts are nearly equal, a rounding decides, and few tokens of a step show it. One of three
# healthy versions of a random Qwen3-MoE in float32 had one such token of 2,560, and one of three of
# a trained one in bfloat16.
REROUTED_SHARE = 2e-3
# How often, and how many of the sequences whose largest difference is above the limit are rounded
# again before it counts. Of 8 steps of a tuned tiny model in bfloat16, two had a token 4.3 and 5.3
# times as far away as one rounding moved any; of eight roundings, one moved it as far.
TAIL_SEEDS = range(2**20, 2**20 + 8)
TAIL_SEQUENCES = 8
# Steps from one measurement of the noise, which changes with the weights, to the next.
NOISE_EVERY = 32


class AlignmentError(UserError):
    """Engine and actor disagree on the log-probs of the same tokens under the same weights."""


@dataclass(frozen=True)
class Noise:
    """The actor against itself with another rounding."""

    excess: float  # Mean of exp|difference|, minus 1.
    max_abs: float  # Largest |difference|, in nats.


@dataclass(frozen=True)
class Limits:
    """Largest allowed differences of engine and actor."""

    mean_exp_abs: float  # Limit of the mean of exp|difference| over all tokens.
    max_abs: float  # Limit of the largest |difference| among the probe's tokens, in nats.


def limits(config: Config, noise: Noise) -> Limits:
    """The limits of a model with this rounding noise; ``alignment.max_mean_exp_abs_diff`` goes
    before."""
    given = config.alignment.max_mean_exp_abs_diff
    if given is not None:
        return Limits(given, torch.inf)
    excess, largest = NOISE_FACTOR * noise.excess, MAX_FACTOR * noise.max_abs
    if config.model.dtype is DType.float32:
        excess, largest = max(excess, FLOAT32_EXCESS), max(largest, FLOAT32_MAX)
    return Limits(1 + excess, largest)


def probe(weights_versions: Tensor, sequence_lengths: Tensor, now: int, least: int) -> list[int]:
    """Sequences of about ``PROBE_TOKENS`` tokens, evenly over those of the present weights. Returns
    places among the ``N``, in their order; none if no sequence is of the present weights.

    Args:
        weights_versions: ``[N]`` int64, of the engines that sampled.
        sequence_lengths: ``[N]`` int64, in tokens.
        now: The actor's weights version.
        least: Sequences that the ranks need, one for each data-parallel rank. If fewer are of
            the present weights, others are added.
    """
    is_fresh = weights_versions == now
    fresh: list[int] = torch.nonzero(is_fresh).flatten().tolist()
    if not fresh:
        return []
    tokens = int(sequence_lengths[is_fresh].sum())
    wanted = max(least, -(-PROBE_TOKENS * len(fresh) // tokens))
    if wanted <= len(fresh):
        return [fresh[place * len(fresh) // wanted] for place in range(wanted)]
    others: list[int] = torch.nonzero(~is_fresh).flatten().tolist()
    return sorted(fresh + others[: max(0, least - len(fresh))])


def measure_noise(
    actor: ActorGroup, batch: TrainingBatch, seed: int, quantized: bool = False
) -> Noise:
    """Take the log-probs of a few sequences twice, the second time with another rounding, and in
    the model's type if the actor trains in FP8 (``actor.fp8``), as engines compute them.
    ``quantized``: noise with the FP8 parts of the engines in addition."""
    usual, _ = actor.log_probs(batch)
    noisy, _ = actor.log_probs(batch, "quantized_noise" if quantized else "noise", seed)
    found = measure(usual, noisy).metrics()
    return Noise(found["mean_exp_abs_diff"] - 1, found["max_abs_diff"])


@dataclass(frozen=True)
class _Seen:
    """Differences in the samples of the present weights."""

    places: Tensor  # Sequences of the batch that were compared.
    farthest: Tensor  # Farthest token of each; see Alignment.farthest.
    among: Sequence[int]  # The probe's, as indices of places.
    worst: int  # Index of the sequence with the farthest token of the present weights.
    mean: float  # Mean of exp|difference|.
    largest: float  # Largest |difference| of the probe, in nats.

    @classmethod
    def of(cls, run: Running, alignment: Alignment, sequences: Sequences) -> _Seen | None:
        """``None``: nothing is of the present weights."""
        now = run.sampling.pool.weights_version
        order = alignment.places.argsort()
        places, farthest = alignment.places[order], alignment.farthest[order]
        versions = sequences.weights_versions[places]
        lengths = sequences.sequence_lengths[places]
        among = probe(versions, lengths, now, run.layout.actor.data_parallel)
        if not among:
            return None
        fresh = versions == now
        worst = int(torch.where(fresh, farthest[:, 0], -1.0).argmax())
        mean = alignment.fresh.metrics()["mean_exp_abs_diff"]
        largest = float(farthest[among, 0][fresh[among]].max())
        return cls(places, farthest, among, worst, mean, largest)

    @property
    def chosen(self) -> list[int]:
        """The probe's sequences, as rows of the batch."""
        rows: list[int] = self.places[self.among].tolist()
        return rows

    @property
    def sequence(self) -> int:
        """The worst, as a row of the batch."""
        return int(self.places[self.worst])

    def within(self, allowed: Limits) -> bool:
        """Whether the differences are within limits; NaN is not."""
        return self.mean <= allowed.mean_exp_abs and self.largest <= allowed.max_abs


class Gate:
    """The gate of one run. It keeps the last measurement of the noise, and what a failure has
    already looked into where the run continues with a warning."""

    def __init__(self) -> None:
        self._noise: Noise | None = None
        self._measured_at = 0
        self._explained_at: int | None = None

    @property
    def noise_excess(self) -> float:
        """Excess of the last measurement; 0 before the first."""
        return 0.0 if self._noise is None else self._noise.excess

    def check(
        self, run: Running, alignment: Alignment, sequences: Sequences, *, step: int, updated: bool
    ) -> dict[str, float]:
        """Judge the samples of the present weights. Raises AlignmentError: the difference is above
        the limits that the noise of this very step gives.

        Args:
            alignment: Log-prob comparison over some sequences, under the weights that sampled them.
            updated: The actor's weights have changed since the log-probs were taken.

        Returns:
            ``alignment/...``: the noise, and the difference as a multiple of it, at steps 1, 33,
            65 and so on. Other steps use what was measured before, which depends on where a run
            resumed, and curves do not. Of an MoE the tokens that took other experts, if there are.
        """
        seen = _Seen.of(run, alignment, sequences)
        if seen is None:
            return {}
        if not math.isfinite(seen.farthest[seen.worst, 2]):
            raise AlignmentError(_overflow(step, seen.sequence, seen.farthest[seen.worst]))
        given = run.config.alignment.max_mean_exp_abs_diff is not None
        noise = Noise(0.0, 0.0) if given else self._noise_for(run, sequences, seen, step)
        allowed, rerouted = limits(run.config, noise), 0
        if not seen.within(allowed):
            if not given:
                rerouted = _count_rerouted(run, alignment.fresh, allowed, updated)
            if not rerouted:
                said = _message(run.config, seen, allowed, noise, alignment.fresh.tokens)
                self._fail(run, sequences, seen, noise, said, step=step, updated=updated)
        found = {"alignment/rerouted_tokens": float(rerouted)} if rerouted else {}
        if given or (step - 1) % NOISE_EVERY:
            return found
        found |= {
            "alignment/noise_excess": noise.excess,
            "alignment/noise_ratio": (seen.mean - 1) / noise.excess if noise.excess else 0.0,
            "alignment/max_noise_ratio": seen.largest / noise.max_abs if noise.max_abs else 0.0,
        }
        if engines_in_fp8(run.config):
            plain = measure_noise(run.actor, sequences.select(seen.chosen), seed=step)
            found["alignment/unquantized_noise_excess"] = plain.excess
        return found

    def _explains(self, step: int) -> bool:
        """Whether a failure in this step is looked into: none was in the last few."""
        last = self._explained_at
        return last is None or not 0 <= step - last < NOISE_EVERY

    def _noise_for(self, run: Running, sequences: Sequences, seen: _Seen, step: int) -> Noise:
        """The noise to judge with: measured now if it is due, or if the last one is exceeded."""
        noise = self._noise
        due = (step - 1) % NOISE_EVERY == 0 or step - self._measured_at >= NOISE_EVERY
        if (
            due
            or noise is None
            or (self._explains(step) and not seen.within(limits(run.config, noise)))
        ):
            noise = self._measure(run, sequences, seen.chosen, step)
        allowed = limits(run.config, noise)
        if seen.mean <= allowed.mean_exp_abs and not seen.within(allowed):
            noise = self._tail(run, sequences, seen, allowed, noise)
        return noise

    def _fail(
        self,
        run: Running,
        sequences: Sequences,
        seen: _Seen,
        noise: Noise,
        said: str,
        *,
        step: int,
        updated: bool,
    ) -> NoReturn:
        """Say where the two differ, unless an earlier step's message did. Raises AlignmentError:
        always."""
        worst = seen.farthest[seen.worst]
        said += _worst(seen.sequence, worst)
        if not self._explains(step):
            last = self._explained_at
            raise AlignmentError(f"{said}See the message of step {last} for the location.")
        self._explained_at = step
        if not updated:
            rows = sorted({*seen.chosen, seen.sequence})
            said += _again(run, sequences, rows, seen.sequence, worst, noise)
        tokens = sequences.select([seen.sequence]).tokens.tolist()
        raise AlignmentError(said + _where(run, updated, tokens))

    def _tail(
        self, run: Running, sequences: Sequences, seen: _Seen, allowed: Limits, noise: Noise
    ) -> Noise:
        """The noise with the sequences that are too far away rounded in further ways.

        A single token of a sure policy can be tens of times as sensitive as the others, and one
        rounding shows that by accident alone.
        """
        farthest = seen.farthest[:, 0]
        order = sorted(seen.among, key=lambda at: -float(farthest[at]))
        least = run.layout.actor.data_parallel
        far = [at for at in order if not float(farthest[at]) <= allowed.max_abs]
        chosen = sorted(seen.places[order[: max(least, min(len(far), TAIL_SEQUENCES))]].tolist())
        batch = sequences.select(chosen)
        quantized = bool(engines_in_fp8(run.config))
        found = [measure_noise(run.actor, batch, seed, quantized) for seed in TAIL_SEEDS]
        return Noise(noise.excess, max(noise.max_abs, *(one.max_abs for one in found)))

    def _measure(
        self, run: Running, sequences: Sequences, chosen: Sequence[int], step: int
    ) -> Noise:
        quantized = bool(engines_in_fp8(run.config))
        self._noise = measure_noise(run.actor, sequences.select(chosen), step, quantized)
        self._measured_at = step
        return self._noise


def _fewest_beyond(fresh: Mismatch, allowed: Limits) -> int:
    """How many of the farthest tokens have to be left out, so that the others are within the
    limits; 0: more than ``REROUTED_SHARE``.

    One of several nats makes up most of a mean of ``exp(|d|)``, and need not be beyond the limit of
    the largest difference.
    """
    most = max(1, int(REROUTED_SHARE * fresh.tokens))
    limit = min(allowed.max_abs, fresh.abs_max)
    while True:
        tokens, mean = fresh.beyond(limit)
        if tokens > most:
            return 0
        if mean <= allowed.mean_exp_abs:
            return tokens
        limit /= HISTOGRAM_STEP


def _count_rerouted(run: Running, fresh: Mismatch, allowed: Limits, updated: bool) -> int:
    """Tokens of an MoE that took other experts in the engine: the few that are farthest away, where
    the rest is within the limits and the weights, if they can be compared, are equal. 0: that is
    not what makes the difference.
    """
    if not math.isfinite(fresh.abs_max) or not read_model_spec(run.config.model.path).experts:
        return 0
    tokens = _fewest_beyond(fresh, allowed)
    if not tokens:
        return 0
    pool = run.sampling.pool
    if not updated and not pool.spec.sleeps:
        try:
            compare_weights(run.actor, pool)
        except WeightsError:
            return 0
    return tokens


def _message(config: Config, seen: _Seen, allowed: Limits, noise: Noise, tokens: int) -> str:
    of = " in FP8" if engines_in_fp8(config) else ""
    if config.actor.fp8 is not Fp8.none:
        of += " without actor.fp8"
    found = f"mean exp|logp_actor - logp_engine| is {seen.mean:.7g} over {tokens} tokens"
    if config.alignment.max_mean_exp_abs_diff is not None:
        return f"{found}, above alignment.max_mean_exp_abs_diff={allowed.mean_exp_abs:g}"
    return (
        f"{found} (limit {allowed.mean_exp_abs:.7g}), and the largest difference "
        f"{seen.largest:.3g} nats (limit {allowed.max_abs:.3g}); rounding noise of the same "
        f"model{of} is {1 + noise.excess:.7g} and {noise.max_abs:.3g}, and the limits are "
        f"{NOISE_FACTOR:g} and {MAX_FACTOR:g} times that"
    )


def _overflow(step: int, sequence: int, farthest: Tensor) -> str:
    """The engine may have computed the same: what is wrong is not that the two differ."""
    _, token, actor, engine = farthest.tolist()
    cause = (
        "weights in model.path that are not finite, or a model.dtype that is too narrow"
        if step == 1
        else "an earlier update that was too large: use a smaller actor.optimizer.lr or "
        "actor.optimizer.clip_grad_norm, and resume from a checkpoint before it (runner.resume)"
    )
    return (
        f"the actor's log-prob of response token {token:.0f} of sequence {sequence} of the batch "
        f"is {actor:g}, the engine's {engine:g}: the model computes no numbers any more. The "
        f"likely cause: {cause}"
    )


def _worst(sequence: int, farthest: Tensor) -> str:
    _, token, actor, engine = farthest.tolist()
    return (
        f"; worst at response token {token:.0f} of sequence {sequence} of the batch: actor "
        f"{actor:.4f}, engine {engine:.4f}. "
    )


def _again(
    run: Running,
    sequences: Sequences,
    rows: list[int],
    sequence: int,
    farthest: Tensor,
    noise: Noise,
) -> str:
    """Whether the actor gives the worst token the same log-prob once more, and if so what the
    differences look like.

    Args:
        rows: Sequences to run, one for each data-parallel rank at least, the worst among them.
        farthest: Its row of ``Alignment.farthest``.
        noise: The actor against itself.
    """
    batch = sequences.select(rows)
    log_probs, entropy = run.actor.log_probs(batch)
    first = int(batch.response_lengths[: rows.index(sequence)].sum())
    _, token, before, _ = farthest.tolist()
    now = float(log_probs[first + int(token)])
    if abs(now - before) <= max(noise.max_abs, FLOAT32_EXCESS):
        least = max(noise.max_abs, FLOAT32_EXCESS)
        own: Any = slice(None) if batch.model_mask is None else batch.model_mask
        compared = (log_probs[own], batch.engine_log_probs[own], entropy[own])
        cause = likely_cause(*compared, batch.model_lengths, least)
        return f"The actor computes the same log-prob again. {cause}{'. ' if cause else ''}"
    return (
        f"The actor now computes {now:.4f}: its own log-probs do not repeat, so suspect the "
        "actor's forward pass, not the engine. "
    )


def _where(run: Running, updated: bool, tokens: list[int]) -> str:
    """Whether the weights differ, and which, as far as that can still be seen; if they do not, in
    which layer the values of ``tokens`` do."""
    pool = run.sampling.pool
    end = " alignment.on_fail=warn continues with a warning"
    if updated or pool.spec.sleeps:
        reason = "the actor was updated since" if updated else "sleeping engines drop their weights"
        return (
            f"The weights can no longer be compared ({reason}): weights.verify_every=1 compares "
            f"them at every weight sync.{end}"
        )
    try:
        count = compare_weights(run.actor, pool)
    except WeightsError as error:
        return f"{error}.{end}"
    return (
        f"The fingerprints of all {count} tensors in the engines are equal to the actor's, so the "
        "difference is in the forward pass: a model setting that the two read differently, or a "
        f"kernel. {where_they_part(run, tokens)}{end}"
    )
