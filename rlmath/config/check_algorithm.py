"""Settings of the algorithm that contradict each other, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.config.schema import AlgorithmConfig, Config, OldLogProbs
from rlmath.config.schema_algorithm import CorrectionKind, KlPlace, ReferenceKind
from rlmath.config.settings import by_key, value_text

# Advantages that compare the samples of a problem with each other.
_OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "batch_std", "gdpo", "pass_at_k")

_CLIPPED = ("ppo_clip", "gspo", "gspo_token", "cispo", "gmpo")


@dataclass(frozen=True)
class _ReadBy:
    """Settings that do nothing unless another one has one of these values."""

    keys: tuple[str, ...]
    chooser: str
    choices: tuple[Any, ...]


_READ_BY = (
    _ReadBy(("leave_one_out",), "advantage", ("grpo",)),
    _ReadBy(("pass_at_k",), "advantage", ("pass_at_k",)),
    _ReadBy(("clip_low", "clip_high"), "loss", _CLIPPED),
    _ReadBy(("dual_clip",), "loss", ("ppo_clip",)),
    _ReadBy(("sapo_tau_positive", "sapo_tau_negative"), "loss", ("sapo",)),
    _ReadBy(("dppo_divergence", "dppo_threshold"), "loss", ("dppo",)),
    _ReadBy(("reference.every",), "reference.kind", (ReferenceKind.averaged, ReferenceKind.reset)),
    _ReadBy(("reference.decay",), "reference.kind", (ReferenceKind.averaged,)),
    _ReadBy(("reference.reset_optimizer",), "reference.kind", (ReferenceKind.reset,)),
)
# Settings that do nothing at the default of another one: (they, that one, what it should be).
_NEED = (
    (("kl_in", "kl_target", "reference.kind"), "kl_coef", "more than 0"),
    (("kl_horizon_samples",), "kl_target", "a number"),
    (("entropy_coef_step", "entropy_coef_max"), "entropy_target", "a number"),
)
# Losses whose ratio is that of a whole sequence.
_OF_SEQUENCES = ("gspo", "gspo_token", "gmpo")
_CORRECTIONS = {
    "low": ("token_mask", "seq_mask_geometric", "seq_mask_sum"),
    "high": (
        "token_truncate",
        "token_mask",
        "seq_truncate",
        "seq_mask_geometric",
        "seq_mask_sum",
    ),
}


def algorithm_problems(config: Config) -> Iterator[str]:
    """A message for each setting of ``algorithm`` that cannot work as it is."""
    algorithm = config.algorithm
    yield from _unread(algorithm)
    yield from _group_size(algorithm)
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.clip_high:
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip}: has to be more than 1 + clip_high = "
            f"{1 + algorithm.clip_high:g}; 3 is usual, null turns it off"
        )
    yield from _correction(algorithm)
    yield from _kl_and_entropy(algorithm)


def _unread(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Settings that were changed and that the chosen advantage or loss does not read."""
    for rule in _READ_BY:
        chosen = _value(algorithm, rule.chooser)
        if chosen in rule.choices:
            continue
        for key in rule.keys:
            value, default = _value(algorithm, key), by_key()[f"algorithm.{key}"].default
            if value != default:
                yield (
                    f"algorithm.{key}={value_text(value)}: algorithm.{rule.chooser}="
                    f"{value_text(chosen)} does not read it; leave it at {value_text(default)}, or "
                    f"take {rule.chooser}={' or '.join(value_text(c) for c in rule.choices)}"
                )
    for keys, other, needed in _NEED:
        value, default = _value(algorithm, other), by_key()[f"algorithm.{other}"].default
        for key in keys if value == default else ():
            own, own_default = _value(algorithm, key), by_key()[f"algorithm.{key}"].default
            if own != own_default:
                yield (
                    f"algorithm.{key}={value_text(own)}: does nothing while algorithm.{other}="
                    f"{value_text(value)}; make that {needed}, or leave this at "
                    f"{value_text(own_default)}"
                )


def _value(algorithm: AlgorithmConfig, key: str) -> Any:
    found: Any = algorithm
    for name in key.split("."):
        found = getattr(found, name)
    return found


def _group_size(algorithm: AlgorithmConfig) -> Iterator[str]:
    size, k = algorithm.group_size, algorithm.pass_at_k
    if size == 1 and algorithm.advantage in _OF_GROUPS:
        yield (
            f"algorithm.group_size=1: {algorithm.advantage} compares the samples of a problem with "
            "each other, so a group of 1 has advantage 0 always; take at least 2"
        )
    elif algorithm.advantage == "pass_at_k" and k >= size:
        yield (
            f"algorithm.pass_at_k={k}: of group_size={size} samples there is only one set of {k}, "
            f"which leaves no advantage; take at most {size - 1}, or group_size of {k + 1} or more"
        )


def _correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    kind = correction.kind.name
    for name, kinds in _CORRECTIONS.items():
        value = getattr(correction, name)
        if value is not None and kind not in kinds:
            yield (
                f"algorithm.correction.{name}={value:g}: correction.kind={kind} has no such bound; "
                f"set it to null, or take one of {', '.join(kinds)}"
            )
    if (
        correction.low is not None
        and correction.high is not None
        and correction.low > correction.high
    ):
        yield (
            f"algorithm.correction.low={correction.low:g}: is above correction.high="
            f"{correction.high:g}"
        )
    measured = correction.kind is not CorrectionKind.none or correction.veto_below is not None
    if measured and algorithm.old_log_probs is OldLogProbs.engine:
        key = "kind" if correction.kind is not CorrectionKind.none else "veto_below"
        yield (
            f"algorithm.correction.{key}={value_text(getattr(correction, key))}: with "
            "old_log_probs=engine the loss's own ratio is already that of actor to engine, and the "
            "actor's log-probs before the update are not known; take old_log_probs=recompute, or "
            "correction.kind=none and veto_below=null"
        )


def _kl_and_entropy(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_in is KlPlace.reward and algorithm.kl_estimator != "k1":
        yield (
            f"algorithm.kl_estimator={algorithm.kl_estimator}: with kl_in=reward the KL is a cost "
            "without gradient, and only k1 makes its policy gradient that of the KL; take "
            "kl_estimator=k1"
        )
    if algorithm.entropy_target is not None and not (
        0 <= algorithm.entropy_coef <= algorithm.entropy_coef_max
    ):
        yield (
            f"algorithm.entropy_coef={algorithm.entropy_coef:g}: is where the way to "
            f"entropy_target begins, so it has to be from 0 to entropy_coef_max="
            f"{algorithm.entropy_coef_max:g}"
        )
    if algorithm.entropy_top_share < 1 and algorithm.loss in _OF_SEQUENCES:
        yield (
            f"algorithm.entropy_top_share={algorithm.entropy_top_share:g}: {algorithm.loss} takes "
            "the ratio of a whole sequence, which a mask of single tokens would make that of "
            "another one; take 1, or a loss of tokens such as ppo_clip"
        )
