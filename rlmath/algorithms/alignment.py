"""A rank's report on its sequences' log-probs: additive sums, and the farthest tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmath.algorithms.mismatch import Mismatch, measure, measure_by_lag
from rlmath.algorithms.ragged import repeat
from rlmath.algorithms.totals import add
from rlmath.types import TrainingBatch
from rlmath.utils.lazy_torch import Tensor, torch


def token_lags(batch: TrainingBatch, now: int) -> Tensor:
    """``[R]`` int64: weights version ``now`` minus the version that sampled each token."""
    lags = repeat(now - batch.weights_versions, batch.response_lengths)
    return lags if batch.token_ages is None else lags + batch.token_ages


@dataclass(frozen=True)
class Alignment:
    """The actor's log-probs against the rollout log-probs, over some of a step's sequences."""

    # Over all tokens, masked or not, that the current weights sampled and for which the comparison
    # is valid.
    fresh: Mismatch
    # Over the tokens of the loss, by the age of the weights that sampled them.
    by_lag: Mapping[int, Mismatch]
    entropy_sum: float  # The actor's entropy over the tokens of the loss, in nats.
    places: Tensor  # [N] int64, indices of the sequences in the step.
    # [N, 4] float64: for each sequence the token with the largest difference, among those sampled
    # by its newest weights: the difference in nats (infinite for NaN, 0 where no token can be
    # compared), the token's index in the response, and the log-probs of actor and engine.
    farthest: Tensor

    @classmethod
    def of_batch(
        cls,
        batch: TrainingBatch,
        log_probs: Tensor,
        entropy: Tensor,
        now: int,
        *,
        places: Tensor | None = None,
        stale_kv: bool = False,
    ) -> Alignment:
        """Compare the log-probs of a batch's sequences with the engines'.

        Args:
            batch: The batch, with the rollout log-probs.
            log_probs: ``[R]``, the actor's before the first update, in nats.
            entropy: ``[R]``, the actor's, in nats.
            now: The actor's weights version.
            places: ``[N]`` int64; ``None``: the batch is the whole step.
            stale_kv: The newest tokens of a response that older weights started were sampled with
                the older weights' keys and values (``rollout.kv=keep``). No weights reproduce their
                log-probs, so only responses of a single version can be compared.
        """
        engine_log_probs, lags = batch.engine_log_probs, token_lags(batch, now)
        loss_mask, model_mask = batch.loss_mask, batch.model_mask
        is_fresh = lags == 0 if model_mask is None else (lags == 0) & model_mask
        if stale_kv:
            is_fresh &= ~_is_mixed(lags, batch.response_lengths)
        fresh = measure(log_probs, engine_log_probs, is_fresh)
        if loss_mask.all() and is_fresh.all():
            by_lag = {0: fresh}  # The same tokens, so they are not measured twice.
        else:
            by_lag = measure_by_lag(log_probs, engine_log_probs, lags, loss_mask)
        difference = (log_probs - engine_log_probs).abs().nan_to_num(nan=torch.inf)
        if model_mask is not None:
            difference = torch.where(model_mask, difference, -1.0)
        if stale_kv:
            difference = torch.where(_is_mixed(lags, batch.response_lengths), 0.0, difference)
        return cls(
            fresh,
            by_lag,
            float(torch.where(loss_mask, entropy, 0.0).double().sum()),
            torch.arange(len(batch)) if places is None else places,
            _farthest(difference, lags, batch.response_lengths, (log_probs, engine_log_probs)),
        )

    @classmethod
    def join(cls, parts: Sequence[Alignment]) -> Alignment:
        """Combine the reports of all ranks."""
        total: Alignment = parts[0]
        for one in parts[1:]:
            total = cls(
                total.fresh + one.fresh,
                add(total.by_lag, one.by_lag),
                total.entropy_sum + one.entropy_sum,
                torch.cat([total.places, one.places]),
                torch.cat([total.farthest, one.farthest]),
            )
        return total

    @property
    def loss(self) -> Mismatch:
        """Totals over the tokens of the loss, for all lags."""
        return functools.reduce(add, self.by_lag.values())

    @property
    def entropy(self) -> float:
        """Mean over the tokens of the loss, in nats; NaN without tokens."""
        tokens = self.loss.tokens
        return self.entropy_sum / tokens if tokens else float("nan")


def _farthest(
    difference: Tensor, lags: Tensor, lengths: Tensor, log_probs: tuple[Tensor, Tensor]
) -> Tensor:
    """See ``Alignment.farthest``. ``difference``: ``[R]``, negative where there is none."""
    import numpy as np

    found = torch.zeros(len(lengths), 4, dtype=torch.float64)
    own = lengths[lengths > 0]
    if not len(own):
        return found
    ends = own.cumsum(0)
    starts = ends - own
    # Older tokens legitimately differ, and would hide a wrong fresh one.
    newest = torch.where(lags == repeat(lags[ends - 1], own), difference, -1.0)
    # torch's reduction of segments takes forty times as long.
    largest = torch.from_numpy(np.maximum.reduceat(newest.numpy(), starts.numpy()))
    places = (newest == repeat(largest, own)).nonzero()[:, 0]
    tokens = places[torch.searchsorted(places, starts)]  # The first of each sequence.
    columns = (largest.clamp(min=0.0), tokens - starts, *(one[tokens] for one in log_probs))
    found[lengths > 0] = torch.stack([one.double() for one in columns], dim=1)
    return found


def _is_mixed(lags: Tensor, response_lengths: Tensor) -> Tensor:
    """``[R]`` bool, true for tokens of sequences sampled by several weights versions."""
    parts = lags.split(response_lengths.tolist())
    mixed = torch.tensor([bool(len(part) and (part != part[0]).any()) for part in parts])
    return repeat(mixed, response_lengths)
