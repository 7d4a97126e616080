"""Settings of the algorithm that contradict each other, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlmath.algorithms.advantages import ADVANTAGES, AdvantageTraits, needs_value_model
from rlmath.algorithms.correction import CORRECTIONS, NONE
from rlmath.algorithms.filters import GROUP_FILTERS, FilterTraits, TruncatedRule
from rlmath.algorithms.kl import KL_ESTIMATORS, KlTraits
from rlmath.algorithms.losses import LOSSES, LossTraits
from rlmath.checks.pairs import unused_problems
from rlmath.config.algorithm import KlPlace
from rlmath.config.rollout import KvAtSync, Overlap, RolloutConfig, overlap_of
from rlmath.config.schema import AlgorithmConfig, Config, OldLogProbs
from rlmath.config.settings import by_key, value_of, value_text
from rlmath.rewards.registry import any_graded


def algorithm_problems(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    yield from _value_model(config)
    yield from unused_problems(config)
    yield from _group_size(algorithm)
    yield from _whitening(algorithm)
    yield from _aggregation(algorithm)
    yield from _correction(algorithm)
    yield from _kl_and_entropy(algorithm)
    yield from _filter(algorithm)
    yield from _grades(config)
    yield from _curriculum(config)
    yield from _schedule(config)


def _loss(algorithm: AlgorithmConfig) -> LossTraits:
    """Traits of the loss; the defaults if there is none of that name, which is an error already."""
    return LOSSES.traits(algorithm.loss) if LOSSES.has(algorithm.loss) else LossTraits()


def _advantage(algorithm: AlgorithmConfig) -> AdvantageTraits:
    name = algorithm.advantage
    return ADVANTAGES.traits(name) if ADVANTAGES.has(name) else AdvantageTraits(compares=False)


def _filter_traits(algorithm: AlgorithmConfig) -> FilterTraits:
    name = algorithm.filter.keep
    return GROUP_FILTERS.traits(name) if GROUP_FILTERS.has(name) else FilterTraits()


def _schedule(config: Config) -> Iterator[str]:
    rollout, algorithm, overlap = config.rollout, config.algorithm, overlap_of(config.rollout)
    if problem := _contradiction(rollout, overlap):
        yield problem
        return
    if rollout.kv is KvAtSync.keep and not overlap.cuts_at_sync:
        yield (
            f"rollout.kv=keep with rollout.schedule={overlap.name}: no response continues under "
            "the weights that come after those that began it; use rollout.kv=recompute, or "
            "rollout.schedule=continuous and a rollout.max_lag of 1 or more"
        )
    if overlap.is_beside and algorithm.filter.oversample > 1:
        yield (
            f"algorithm.filter.oversample={algorithm.filter.oversample:g}: with "
            f"rollout.schedule={overlap.name} "
            + (
                "as many groups run as rollout.max_lag allows; use 1"
                if overlap.cuts_at_sync
                else "the groups that are too many would be trained two steps after the weights "
                "that sampled them; use 1, which asks for another group where one is dropped"
            )
        )
    reasons = []
    if not algorithm.correction.is_on:
        reasons.append(
            "algorithm.correction.kind=none: does not correct for it; use token_truncate"
        )
    if not _loss(algorithm).bounds_ratio:
        reasons.append(
            f"algorithm.loss={algorithm.loss}: does not bound the importance ratio; use ppo_clip"
        )
    if rollout.allow_uncorrected and not (reasons and overlap.max_lag):
        yield (
            "rollout.allow_uncorrected=true: does nothing, as nothing uncorrected is trained; "
            "leave it at false"
        )
    if overlap.max_lag and not rollout.allow_uncorrected:
        for reason in reasons:
            yield (
                f"{reason}, or rollout.allow_uncorrected=true: with rollout.schedule={overlap.name}"
                f" tokens are up to rollout.max_lag={overlap.max_lag} steps older than the weights "
                "that train on them"
            )


def _contradiction(rollout: RolloutConfig, overlap: Overlap) -> str | None:
    """Why there is no schedule of this name with these numbers; ``None``: there is."""
    name = rollout.schedule
    if overlap != Overlap() and name not in (None, replace(overlap, max_lag=1).name):
        numbers = {key: getattr(rollout, key) for key in ("max_lag", "cut_after_tokens")}
        given = [f"rollout.{key}={n}" for key, n in numbers.items() if n is not None]
        theirs = overlap_of(replace(rollout, schedule=None)).name
        return (
            f"rollout.schedule={name} contradicts {' and '.join(given)}, of "
            f"rollout.schedule={theirs}; leave out the name, or the number that does not belong to "
            "it"
        )
    if overlap.cut_after_tokens is None and overlap.max_lag > 1:
        return (
            f"rollout.max_lag={overlap.max_lag}: rollout.schedule=pipelined samples one step "
            "ahead; use 1, or give rollout.cut_after_tokens, with which responses are cut"
        )
    return None


def _value_model(config: Config) -> Iterator[str]:
    """The value model's settings must be the defaults where there is none."""
    if needs_value_model(config.algorithm.advantage):
        return
    estimators = " or ".join(ADVANTAGES.having(lambda one: one.needs_values))
    for key, setting in by_key().items():
        if not key.startswith("value."):
            continue
        found = value_of(config, key)
        if found != setting.default:
            yield (
                f"{key}={value_text(found)}: there is a value model with "
                f"algorithm.advantage={estimators} only, not "
                f"{config.algorithm.advantage}; leave it at {value_text(setting.default)}"
            )


def _group_size(algorithm: AlgorithmConfig) -> Iterator[str]:
    size = algorithm.group_size
    k = algorithm.advantage_options.get("k", 1)
    if size == 1 and _advantage(algorithm).compares:
        yield (
            f"algorithm.group_size=1: {algorithm.advantage} compares the samples of a problem with "
            "each other, so a group of 1 has advantage 0 always; use at least 2"
        )
    elif algorithm.advantage == "pass_at_k" and k >= size:
        yield (
            f"algorithm.advantage_options.k={k}: of group_size={size} samples there is at most one "
            f"set of {k}, which leaves no advantage; use at most {size - 1}, or group_size of "
            f"{k + 1} or more"
        )


def _whitening(algorithm: AlgorithmConfig) -> Iterator[str]:
    name, traits = algorithm.advantage, _advantage(algorithm)
    if algorithm.whiten_tokens and traits.before_whitening is not None:
        yield f"algorithm.whiten_tokens=true: advantage={name} is whitened over tokens already"
    if algorithm.whiten_tokens and traits.needs_values:
        yield f"algorithm.whiten_tokens=true: advantage={name} has value.whiten_advantages for that"


def _aggregation(algorithm: AlgorithmConfig) -> Iterator[str]:
    """A loss of sequences has to be summed as its paper does, unless that is asked for."""
    loss, kind = algorithm.loss, algorithm.aggregation
    defined = _loss(algorithm).aggregations
    fits = not defined or kind in defined
    if not fits and not algorithm.allow_other_aggregation:
        yield (
            f"algorithm.aggregation={kind}: loss={loss} is defined with {' or '.join(defined)}, "
            f"and is another objective with this one; use algorithm.aggregation={defined[0]}, or "
            "algorithm.allow_other_aggregation=true to do it all the same"
        )
    if fits and algorithm.allow_other_aggregation:
        yield (
            f"algorithm.allow_other_aggregation=true: does nothing, as loss={loss} is defined with "
            f"aggregation={kind}; leave it at false"
        )


def _correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    kind = correction.kind
    if not CORRECTIONS.has(kind):
        return
    traits = CORRECTIONS.traits(kind)
    for name in ("low", "high"):
        value = getattr(correction, name)
        if value is not None and getattr(traits, name) is None:
            kinds = CORRECTIONS.having(lambda one: getattr(one, name) is not None)  # noqa: B023
            yield (
                f"algorithm.correction.{name}={value:g}: correction.kind={kind} has no such "
                f"bound; set it to null, or use one of {', '.join(kinds)}"
            )
    bounds = correction.bounds()
    low, high = bounds.low, bounds.high
    if low is not None and high is not None and low > high:
        yield f"algorithm.correction.low={low:g}: is above correction.high={high:g}"
    if correction.is_on and algorithm.old_log_probs is OldLogProbs.engine:
        key = "kind" if kind != NONE else "veto_below"
        yield (
            f"algorithm.correction.{key}={value_text(getattr(correction, key))}: with "
            "old_log_probs=engine the loss's own ratio is already that of actor to engine, and the "
            "actor's log-probs before the update are not known; use old_log_probs=recompute, or "
            "correction.kind=none and veto_below=null"
        )


def _kl_and_entropy(algorithm: AlgorithmConfig) -> Iterator[str]:
    name = algorithm.kl_estimator
    kl = KL_ESTIMATORS.traits(name) if KL_ESTIMATORS.has(name) else KlTraits(in_reward=True)
    if algorithm.kl_in is KlPlace.reward and not kl.in_reward:
        works = " or ".join(KL_ESTIMATORS.having(lambda one: one.in_reward))
        yield (
            f"algorithm.kl_estimator={name}: with kl_in=reward the KL is a cost "
            f"without gradient, and only {works} makes its policy gradient that of the KL; use "
            f"kl_estimator={works}"
        )
    if algorithm.entropy_target is not None and not (
        0 <= algorithm.entropy_coef <= algorithm.entropy_coef_max
    ):
        yield (
            f"algorithm.entropy_coef={algorithm.entropy_coef:g}: is where the way to "
            f"entropy_target begins, so it has to be from 0 to entropy_coef_max="
            f"{algorithm.entropy_coef_max:g}"
        )
    if algorithm.entropy_top_share < 1 and _loss(algorithm).of_sequences:
        yield (
            f"algorithm.entropy_top_share={algorithm.entropy_top_share:g}: the gradient of "
            f"{algorithm.loss} reaches all tokens of a sequence, whichever are selected; use 1, "
            "or a loss of tokens such as ppo_clip"
        )


def _filter(algorithm: AlgorithmConfig) -> Iterator[str]:
    rules = algorithm.filter
    if rules.oversample > rules.max_rounds:
        yield (
            f"algorithm.filter.oversample={rules.oversample:g}: asks at first for more than "
            f"filter.max_rounds={rules.max_rounds} times prompts_per_step, which is the most; use "
            f"oversample of at most {rules.max_rounds}, or more rounds"
        )
    if (
        algorithm.truncated in (TruncatedRule.penalize, TruncatedRule.scale)
        and _advantage(algorithm).each_reward
    ):
        yield (
            f"algorithm.truncated={algorithm.truncated.name}: changes the sum of the rewards, but "
            f"advantage={algorithm.advantage} normalizes each separately; add the reward "
            "stop_properly to reward.items instead"
        )
    if _filter_traits(algorithm).compares and algorithm.group_size == 1:
        yield (
            f"algorithm.filter.keep={rules.keep}: in a group of group_size=1 all is always "
            "equal, so no group would be kept; use filter.keep=all, or a group_size of 2 or more"
        )


def _grades(config: Config) -> Iterator[str]:
    """Settings that need graded answers, where no reward grades them."""
    algorithm, items = config.algorithm, config.reward.items
    keep, reads_correct = algorithm.filter.keep, _filter_traits(algorithm).reads_correct
    asks = reads_correct or algorithm.curriculum.cooldown
    if not asks or not items or any_graded(item.name for item in items):
        return
    names = ", ".join(item.name for item in items)
    why = f"reward.items ({names}) has no reward that grades answers, which say what is correct"
    works = "add {name: math, weight: 0} to reward.items, which grades and adds nothing to the sum"
    if reads_correct:
        yield (
            f"algorithm.filter.keep={keep}: {why}, so every group would be dropped; {works}, or "
            "use keep=variance"
        )
    if algorithm.curriculum.cooldown:
        yield (
            f"algorithm.curriculum.cooldown=true: {why}, so no problem would have a pass rate; "
            f"{works}, or set it to false"
        )


def _curriculum(config: Config) -> Iterator[str]:
    curriculum, limit = config.algorithm.curriculum, config.rollout.max_response_tokens
    if curriculum.cooldown and curriculum.too_hard >= curriculum.too_easy:
        yield (
            f"algorithm.curriculum.too_hard={curriculum.too_hard:g}: has to be less than "
            f"curriculum.too_easy={curriculum.too_easy:g}"
        )
    key = "algorithm.curriculum.length_stages"
    starts = [stage.first_step for stage in curriculum.length_stages]
    if starts and (starts[0] != 1 or starts != sorted(set(starts))):
        yield f"{key}: first steps are {starts}; the first has to be 1, and they have to rise"
    for index, stage in enumerate(curriculum.length_stages):
        if stage.max_response_tokens > limit:
            yield (
                f"{key}[{index}].max_response_tokens={stage.max_response_tokens}: is above "
                f"rollout.max_response_tokens={limit}, which engines and memory are laid out for; "
                "use at most that, or raise it"
            )
