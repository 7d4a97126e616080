"""Sections of ``algorithm``, see :class:`rlmath.config.schema.AlgorithmConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CorrectionKind(Enum):
    none = "none"
    auto = "auto"
    token_truncate = "token_truncate"
    token_mask = "token_mask"
    seq_truncate = "seq_truncate"
    seq_mask_geometric = "seq_mask_geometric"
    seq_mask_sum = "seq_mask_sum"


class DppoDivergence(Enum):
    tv = "tv"
    kl = "kl"


class KlPlace(Enum):
    loss = "loss"
    reward = "reward"


class ReferenceKind(Enum):
    frozen = "frozen"
    averaged = "averaged"
    reset = "reset"


@dataclass
class ReferenceConfig:
    # The model that the KL term holds the policy to: the one that the run began with (frozen), a
    # running average of the policy (averaged), or the policy of some steps ago (reset).
    kind: ReferenceKind = ReferenceKind.frozen
    # Steps between two changes of an averaged or reset reference.
    every: int = 1
    # Share of itself that an averaged reference keeps at each change.
    decay: float = 0.99
    # When the reference is reset, begin Adam's moments anew as well (ProRL).
    reset_optimizer: bool = False


@dataclass
class CorrectionConfig:
    # Correction for an engine that samples from another distribution than the actor has, by
    # w = exp(logp_actor - logp_engine): none; token_truncate (TIS), token_mask (IcePop),
    # seq_truncate, seq_mask_geometric, seq_mask_sum; auto measures each step and picks one of
    # none, token_truncate and token_mask.
    kind: CorrectionKind = CorrectionKind.none
    # Lower bound of what the kind bounds; null: its own, see docs/algorithms.md.
    low: float | None = None
    # Upper bound; null: the kind's own.
    high: float | None = None
    # A sequence with a token whose w is below this takes no part; null: no veto. 1e-4 is usual.
    veto_below: float | None = None
    # A sequence with a negative advantage takes no part in the policy loss when its mean of
    # log(engine's / current probability) is above this, in nats; null: all do.
    off_policy_mask_kl: float | None = None
