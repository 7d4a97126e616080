"""The settings of the objective: what the trainer turns its configuration into."""

from __future__ import annotations

from dataclasses import dataclass

# Losses whose ratio nothing else bounds for a negative advantage.
WITH_DUAL_CLIP = ("ppo_clip", "gspo", "gspo_token", "gmpo", "dppo")
# Of these, the one that has no clip_high.
_WITHOUT_CLIP = ("dppo",)


@dataclass(frozen=True)
class ObjectiveSettings:
    """Numbers that the policy loss, the KL term and the entropy term read.

    Attributes:
        loss: Name of the policy loss, see ``rlmath/algorithms/losses/``.
        clip_low: The importance ratio's lower bound is ``1 - clip_low``.
        clip_high: Its upper bound is ``1 + clip_high``.
        dual_clip: Largest ratio that counts for a negative advantage; ``None``: no cap.
        kl_coef: Weight of the KL term against the reference model; 0: no term.
        kl_estimator: See ``rlmath/algorithms/kl.py``.
        entropy_coef: Weight of the entropy bonus; negative values push entropy down.
        ratio_threshold: The share of tokens whose ratio is above this is measured.
        sapo_tau_positive: Temperature of SAPO's gate for positive advantages.
        sapo_tau_negative: The same for negative ones.
        dppo_divergence: ``tv`` or ``kl``, of the sampled token against all others.
        dppo_threshold: Largest such divergence of a token that still moves away; ``None``: 0.15
            for ``tv``, 0.05 nats for ``kl``.
        off_policy_mask_kl: A sequence with a negative advantage takes no part when its mean of
            ``log(engine's / current probability)`` is above this, in nats; ``None``: all do.
    """

    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    ratio_threshold: float = 5.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    dppo_divergence: str = "tv"
    dppo_threshold: float | None = None
    off_policy_mask_kl: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(
                f"clip_low = {self.clip_low}: the ratio's lower bound 1 - clip_low "
                f"has to be in [0, 1], so clip_low too"
            )
        if self.clip_high < 0.0:
            raise ValueError(
                f"clip_high = {self.clip_high}: the ratio's upper bound 1 + clip_high "
                f"has to be at least 1, so clip_high at least 0"
            )
        if self.dual_clip is not None:
            if self.loss not in WITH_DUAL_CLIP:
                raise ValueError(
                    f"dual_clip = {self.dual_clip} does nothing in loss "
                    f"{self.loss!r}; it works with: {', '.join(WITH_DUAL_CLIP)}"
                )
            if self.loss not in _WITHOUT_CLIP and self.dual_clip <= 1.0 + self.clip_high:
                raise ValueError(
                    f"dual_clip = {self.dual_clip} has to be above 1 + clip_high = "
                    f"{1.0 + self.clip_high}; 3.0 is the usual choice"
                )
        if self.kl_coef < 0.0:
            raise ValueError(f"kl_coef = {self.kl_coef}: at least 0 is needed")
        for name in ("sapo_tau_positive", "sapo_tau_negative", "dppo_threshold"):
            value = getattr(self, name)
            if value is not None and value <= 0.0:
                raise ValueError(f"{name} = {value}: a number above 0 is needed")
        if self.dppo_divergence not in ("tv", "kl"):
            raise ValueError(f"dppo_divergence = {self.dppo_divergence!r}; known are: kl, tv")

    @property
    def dppo_limit(self) -> float:
        """``dppo_threshold``, or the divergence's own default."""
        if self.dppo_threshold is not None:
            return self.dppo_threshold
        return {"tv": 0.15, "kl": 0.05}[self.dppo_divergence]
