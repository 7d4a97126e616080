"""Lines that ``--check`` and every start print: what a run will do.

The arithmetic of batch and layout is in :func:`rlmath.config.arithmetic.describe`; these lines have
the objective, the rewards, the evaluation, and the settings of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf

from rlmath.algorithms.advantages import needs_value_model
from rlmath.config.algorithm import KlPlace
from rlmath.config.arithmetic import policy_updates, value_updates
from rlmath.config.benchmarks import benchmarks_of
from rlmath.config.load import Composed
from rlmath.config.lora import LoraConfig, LoraRollout
from rlmath.config.optimizer import OptimizerConfig
from rlmath.config.options import (
    ENGINE_OPTIONS,
    SOURCE_OPTIONS,
    TRANSPORT_OPTIONS,
    VERIFIER_OPTIONS,
)
from rlmath.config.rollout import keeps_kv, overlap_of
from rlmath.config.schema import Config, OldLogProbs, RewardItem, RolloutSchedule, Schedule
from rlmath.config.settings import value_of
from rlmath.grading import Fallback
from rlmath.model.hub import hub_name
from rlmath.model.spec import ModelSpec
from rlmath.monitor.run_settings import flat
from rlmath.rewards.base import Range
from rlmath.rewards.registry import available_rewards, value_range
from rlmath.utils.sizes import in_words

_LABEL = 9
Origin: TypeAlias = Callable[[str], str]


def describe_training(config: Config, origin: Origin | None = None) -> str:
    """Loss, optimizer, rewards and evaluation of a training run."""
    algorithm = config.algorithm
    lines = [
        *_block("loss", _objective(config)),
        *_block(
            "lr",
            _learning_rate(
                config.actor.optimizer, policy_updates(config), "actor.optimizer.lr", origin
            ),
        ),
        *_lora(config.actor.lora),
        *_schedule(config),
    ]
    if plugins := list(_plugins(config)):
        lines += _block("plugins", plugins)
    if needs_value_model(algorithm.advantage):
        updates = value_updates(config)
        value = _learning_rate(config.value.optimizer, updates, "value.optimizer.lr", origin)
        if config.value.warmup_steps:
            value.append(f"the only model trained in the first {config.value.warmup_steps:,} steps")
        lines += _block("value lr", value)
    lines += _block("rewards", _rewards(config))
    return "\n".join([*lines, *_block("eval", _evaluation(config))])


def describe_model(config: Config, model: ModelSpec) -> str:
    name = hub_name(config.model.path)
    where = f"{name} (in the hub's cache)" if name else config.model.path
    value = 4 if config.model.dtype.name == "float32" else 2
    size = in_words(model.num_parameters * value)
    count = model.num_parameters
    parameters = f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"
    text = f"{where}: {model.architecture}, {parameters} parameters, {size} in "
    return "\n".join(_block("model", [text + config.model.dtype.name]))


def describe_sft(config: Config, origin: Origin | None = None) -> str:
    """Data, batch and optimizer of supervised fine-tuning; see :func:`describe_training`."""
    sft = config.sft
    count = sft.steps * sft.sequences_per_step
    return "\n".join(
        [
            *_block(
                "examples",
                [
                    f"{', '.join(sft.train_paths)}: {config.data.prompt_key} -> {sft.response_key}",
                    f"{sft.steps:,} steps x {sft.sequences_per_step:,} = {count:,} sequences; at "
                    f"most {config.data.max_prompt_tokens:,} tokens a prompt",
                ],
            ),
            *_block("loss", ["negative log-likelihood of the responses, mean over their tokens"]),
            *_block("lr", _learning_rate(sft.optimizer, sft.steps, "sft.optimizer.lr", origin)),
            *_lora(config.actor.lora),
        ]
    )


def describe_evaluation(config: Config) -> str:
    return "\n".join(_block("eval", [one.describe() for one in benchmarks_of(config)]))


def describe_recipe(composed: Composed) -> str:
    """Settings of the chosen recipe, and those that were replaced; empty when none is chosen."""
    file = composed.file_of("recipe")
    if file is None:
        return ""
    recipe = OmegaConf.load(file)
    assert isinstance(recipe, DictConfig)
    recipe.pop("defaults", None)  # Hydra's own: the files that it is composed of.
    final = OmegaConf.structured(composed.config)
    wanted, now = (
        flat(OmegaConf.to_container(one, resolve=True))
        for one in (OmegaConf.merge(final, recipe), final)
    )
    keys = list(flat(OmegaConf.to_container(recipe)))
    replaced = [key for key in keys if key in now and now[key] != wanted[key]]
    name = composed.choices["recipe"]
    of_recipe = f"{name}: {len(keys)} settings"
    if not replaced:
        return "\n".join(_block("recipe", [of_recipe + ", all in force"]))
    lines = []
    for key in replaced:
        by = composed.origin(key)
        # Another loss on the command line has its own options.
        by = "the default" if by == f"recipe {name}" else by
        lines.append(f"  {key}: {_text(wanted[key])} -> {_text(now[key])} ({by})")
    first = f"{of_recipe}, {len(replaced)} of them replaced:"
    return "\n".join(_block("recipe", [first, *lines]))


def _plugins(config: Config) -> Iterator[str]:
    """Source files of the user's code with their hashes, and parts with their options; those of the
    algorithm are among the loss's lines."""
    for name, value in config.plugin_hashes.items():
        yield f"{name} ({value})"
    for section in (SOURCE_OPTIONS, VERIFIER_OPTIONS, ENGINE_OPTIONS, TRANSPORT_OPTIONS):
        chosen, options = value_of(config, section.chooser), value_of(config, section.key)
        # The transports that are rlmath's own have none.
        if chosen is not None and (options or section is not TRANSPORT_OPTIONS):
            yield f"{section.chooser}: {chosen}{_options(options)}"


def _block(label: str, lines: list[str]) -> list[str]:
    first, *rest = lines
    return [f"{label:<{_LABEL}}{first}", *(" " * _LABEL + line for line in rest)]


def _objective(config: Config) -> list[str]:
    algorithm = config.algorithm
    aggregation = f"{algorithm.aggregation}{_options(algorithm.aggregation_options)}"
    if algorithm.aggregation_constant_tokens is not None:
        aggregation += f" over {algorithm.aggregation_constant_tokens:,} tokens"
    advantages = f"advantages {algorithm.advantage}{_options(algorithm.advantage_options)}"
    if needs_value_model(algorithm.advantage):
        advantages += f", gamma {config.value.gamma:g}, lambda {config.value.lam:g}"
    if algorithm.whiten_tokens:
        advantages += ", whitened over the tokens of the step"
    lines = [
        f"{algorithm.loss}{_options(algorithm.loss_options)}, {aggregation}",
        advantages,
        _kl(config),
    ]
    if algorithm.distill_coef:
        lines.append(
            f"distillation: {algorithm.distill_coef:g} x (log-prob of the teacher - of the policy) "
            f"within {algorithm.distill_clip:g} nats is added to each token's advantage"
        )
    if algorithm.entropy_coef or algorithm.entropy_target is not None:
        target = algorithm.entropy_target
        lines.append(
            f"entropy bonus {_number(algorithm.entropy_coef)}"
            + (f", steered to {target:g} nats" if target is not None else "")
        )
    if algorithm.old_log_probs is OldLogProbs.engine:
        lines.append("old log-probs are the rollout's")
    if algorithm.correction.kind != "none":
        options = _options(algorithm.correction.options)
        lines.append(f"mismatch correction {algorithm.correction.kind}{options}")
    if algorithm.filter.options:
        options = _options(algorithm.filter.options)
        lines.append(f"group filter {algorithm.filter.keep}{options}")
    if algorithm.curriculum.options:
        options = _options(algorithm.curriculum.options)
        lines.append(f"curriculum {algorithm.curriculum.kind}{options}")
    if algorithm.truncated.name != "keep":
        lines.append(f"truncated responses: {algorithm.truncated.name}")
    return lines


def _schedule(config: Config) -> list[str]:
    rollout, overlap = config.rollout, overlap_of(config.rollout)
    if rollout.schedule in (None, RolloutSchedule.synchronous) and not overlap.max_lag:
        return []
    lag = f"at most {overlap.max_lag} steps older"
    if not overlap.max_lag:
        lines = [f"{rollout.schedule} with rollout.max_lag=0: as synchronous"]
    elif overlap.budget_tokens:
        lines = [f"carry_over: {overlap.budget_tokens:,} tokens a step, {lag}"]
    elif overlap.cuts_at_sync:
        lines = [
            "continuous: engines sample while the actor trains, and responses continue with new "
            f"weights; {lag}"
        ]
    else:
        lines = [
            "pipelined: engines sample the next step while the actor trains, with weights one step "
            "older"
        ]
    if keeps_kv(rollout):
        lines.append("keys and values of older weights are kept (rollout.kv=keep)")
    if rollout.allow_uncorrected:
        lines.append("older tokens are not corrected for (rollout.allow_uncorrected)")
    return _block("schedule", lines)


def _kl(config: Config) -> str:
    algorithm = config.algorithm
    if not algorithm.kl_coef and algorithm.kl_target is None:
        return "no KL penalty, no reference model"
    place = "loss" if algorithm.kl_in is KlPlace.loss else "reward"
    steered = f", steered to {algorithm.kl_target:g}" if algorithm.kl_target is not None else ""
    return (
        f"KL penalty {_number(algorithm.kl_coef)} x {algorithm.kl_estimator}"
        f"{_options(algorithm.kl_options)} in the {place}{steered}; "
        f"{algorithm.reference.kind.name} reference model"
    )


def _lora(lora: LoraConfig) -> list[str]:
    if not lora.rank:
        return []
    matrices = "every linear layer" if lora.targets is None else ", ".join(lora.targets)
    layers = "" if lora.layers is None else f" of layers {', '.join(map(str, lora.layers))}"
    begin = "" if lora.init_from is None else f", from {lora.init_from}"
    text = f"rank {lora.rank}, alpha {lora.alpha:g}, on {matrices}{layers}{begin}"
    engines = "merged" if lora.rollout is LoraRollout.merged else "adapters only"
    return _block("LoRA", [text + f"; all else is frozen; engines get {engines}"])


def _options(options: Mapping[str, Any]) -> str:
    on = [f"{key} {_text(value)}" for key, value in options.items() if value not in (None, False)]
    return f" ({', '.join(on)})" if on else ""


def _learning_rate(
    optimizer: OptimizerConfig, updates: int, key: str, origin: Origin | None
) -> list[str]:
    """``1e-6 after 320 of 4,000 optimizer steps of warm-up, then constant``, and its origin."""
    begin, warmup = f"{_number(optimizer.lr)},", optimizer.warmup_of(updates)
    if warmup:
        of = f"{warmup:,} of {updates:,} optimizer steps"
        begin = f"{_number(optimizer.lr)} after {of} of warm-up, then"
    end = min(optimizer.decay_steps or updates, updates)
    over = f" over {updates:,} optimizer steps" if not warmup else ""
    if optimizer.schedule is not Schedule.constant:
        to = f" to {_number(optimizer.min_lr)}"
        over = to + (f" by step {end:,}" if warmup or end < updates else over)
    line = (
        f"{begin} {optimizer.schedule.name}{over}; AdamW, weight decay "
        f"{optimizer.weight_decay:g}, gradients clipped at norm {optimizer.clip_grad_norm:g}"
    )
    return [line] if origin is None else [line, f"{key} is from {origin(key)}"]


def _rewards(config: Config) -> list[str]:
    lines, ranges = [], []
    for item in config.reward.items:
        found = _range(config, item)
        ranges.append(found and tuple(sorted(item.weight * end for end in found)))
        values = f"{found[0]:g} to {found[1]:g}" if found else "values of any size"
        weight = f"{item.weight:g} x " if item.weight != 1 else ""
        required = ", required" if item.required else ""
        lines.append(f"{weight}{item.label or item.name}: {values}{required}")
    if len(lines) > 1 and all(ranges):
        low, high = (sum(one[end] for one in ranges if one) for end in (0, 1))
        lines.append(f"sum: {low:g} to {high:g}")
    items = config.reward.items
    if Fallback.number in (
        config.reward.fallback,
        *(item.params.get("fallback") for item in items),
    ):
        lines.append(
            "warning: fallback=number accepts the last number of a response without a box, "
            "whatever its sentence says, so a policy learns to name numbers; train with none"
        )
    return lines


def _range(config: Config, item: RewardItem) -> Range | None:
    """Lowest and highest value before weighting; ``None``: a function of the user's, which may
    return any."""
    if item.name not in available_rewards():
        return None
    if item.name == "math":  # Its class imports the grader, which --check avoids.
        own = {"correct": config.reward.correct, "incorrect": config.reward.incorrect}
        values = {**own, **item.params}
        low, high = sorted((float(values["correct"]), float(values["incorrect"])))
        return low, high
    return value_range(item.name, item.params)


def _evaluation(config: Config) -> list[str]:
    benchmarks = benchmarks_of(config)
    if not benchmarks or not config.eval.every:
        return ["none" + (" (eval.every=0)" if benchmarks else "; give data.eval_paths")]
    when = f"before the first step, every {config.eval.every:,} steps and after the last:"
    return [when, *("  " + one.describe() for one in benchmarks)]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, Mapping):
        return str(value.get("name", dict(value)))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return _number(value) if isinstance(value, float) else str(getattr(value, "name", value))


def _number(value: float) -> str:
    """As people write it: 1e-6."""
    return f"{value:g}".replace("e-0", "e-")
