"""The settings that a replay takes: a layout to compute in, and another choice to compare with."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.algorithms.advantages import needs_value_model
from rlmath.checks.algorithm import algorithm_problems
from rlmath.checks.files import model_folder
from rlmath.checks.layout import experts, model_splits
from rlmath.checks.machine import Machine
from rlmath.checks.pairs import pair_problems, unused_keys
from rlmath.checks.recompute import recompute_problems
from rlmath.checks.routing import routing_problems
from rlmath.checks.run import names
from rlmath.commands.replay.source import Source
from rlmath.config.arithmetic import RunLayout, resolve_layout
from rlmath.config.load import with_values
from rlmath.config.options import is_open
from rlmath.config.rollout import overlap_of
from rlmath.config.schema import Config, Device, Placement
from rlmath.config.settings import by_key, out_of_range, replace_values
from rlmath.config.teacher import TeacherConfig
from rlmath.errors import ConfigError
from rlmath.model.spec import read_model_spec

_LAYOUT = ("actor.", "cluster.")
_NO_LAYOUT = (
    *("actor.optimizer.", "actor.lora.", "actor.offload", "actor.routing_replay"),
    "cluster.placement",
)
_UPDATE = ("algorithm.", "value.")
# Settings that do not change an update: of sampling and rewards, the run's reference model, and
# those that only later steps would notice.
_NO_UPDATE = (
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "algorithm.filter.",
    "algorithm.truncated",
    "algorithm.curriculum.",
    "algorithm.reference.",
    "algorithm.kl_target",
    "algorithm.kl_horizon_samples",
    "algorithm.entropy_coef_step",
    "algorithm.entropy_coef_max",
    "value.optimizer.",
    "value.warmup_steps",
)
_PARALLEL = re.compile(r"actor\.\w+_parallel")


@dataclass(frozen=True)
class Choices:
    """The settings on the command line."""

    layout: tuple[str, ...]
    update: tuple[str, ...]

    @property
    def layout_keys(self) -> frozenset[str]:
        return frozenset(one.partition("=")[0] for one in self.layout)

    @property
    def update_keys(self) -> frozenset[str]:
        return frozenset(one.partition("=")[0] for one in self.update)


def read_choices(overrides: Sequence[str]) -> Choices:
    """Sort the overrides of a command line. ``overrides``: ``key=value``; ``correction.kind``
    stands for ``algorithm.correction.kind``. Raises ConfigError: one that a replay cannot take, and
    why."""
    layout: list[str] = []
    update: list[str] = []
    problems: list[str] = []
    for given in overrides:
        key, equals, value = given.partition("=")
        if key not in by_key() and _is_setting(f"algorithm.{key}"):
            key = f"algorithm.{key}"
        text = f"{key}{equals}{value}"
        if not equals or not _is_setting(key):
            problems += _unknown(text)
        elif key.startswith(_LAYOUT) and not key.startswith(_NO_LAYOUT):
            layout.append(text)
        elif key.startswith(_UPDATE) and not key.startswith(_NO_UPDATE):
            update.append(text)
        else:
            problems.append(_refusal(text, key))
    if problems:
        raise ConfigError.of(problems)
    return Choices(tuple(layout), tuple(update))


def run_config(source: Source, step: int, choices: Choices, folder: Path) -> Config:
    """The settings of a step, to be redone here. Raises ConfigError: an override that does not
    fit."""
    config = with_values(source.run.settings_of(step), choices.layout)
    config.model.path = str(_model_folder(config, source.run.folder))
    runner, cluster, keys = config.runner, config.cluster, choices.layout_keys
    runner.run_dir, runner.progress, runner.metrics_port = str(folder), False, None
    runner.trackers = []
    # One machine, and no engines beside the ranks.
    if "cluster.nodes" not in keys:
        cluster.nodes, cluster.ray_address = 1, None
    cluster.placement = Placement.colocated
    config.rollout.engines = config.rollout.tensor_parallel = 1
    # The batch has the teacher's log-probs.
    config.teacher = TeacherConfig()
    made_on = source.headers[step]["layout"]
    if "cluster.device" not in keys:
        cluster.device = Device(made_on["device"])
    other = any(_PARALLEL.fullmatch(key) for key in keys)
    if not other:
        config.actor.data_parallel = made_on["data_parallel"]
        if config.actor.num_threads is None and cluster.device is Device.cpu:
            config.actor.num_threads = made_on["threads"]
    if config.actor.tensor_parallel == 1 and "actor.sequence_parallel" not in keys:
        config.actor.sequence_parallel = False
    if "actor.pipeline_parallel" in keys and "actor.pipeline_layers" not in keys:
        config.actor.pipeline_layers = None
    return config


def other_config(source: Source, config: Config, choices: Choices) -> Config:
    """The settings of the update to compare with. Raises ConfigError: they do not fit together, or
    need what the run did not have."""
    changed = with_values(source.run.settings_of(source.step), choices.update)
    # One that is no longer used may leave another one unused.
    while of_others := set(unused_keys(changed)) - choices.update_keys:
        changed = replace_values(changed, {key: by_key()[key].default for key in of_others})
    other = copy.deepcopy(config)
    other.algorithm, other.value = changed.algorithm, changed.value
    if overlap_of(other.rollout).max_lag:
        other.rollout.allow_uncorrected = True  # One update that is only looked at.
    known = {*_of_algorithm(config)}
    problems = [one for one in _of_algorithm(other) if one not in known]
    problems += _without_models(source, config, other)
    if problems:
        raise ConfigError.of(problems)
    return other


def check_ranks(
    config: Config, machine: Machine, sequences: int, other: Config | None = None
) -> RunLayout:
    """Refuse a layout that cannot do the step. Returns it. Raises ConfigError: one line for each
    problem."""
    device = machine.device(config.cluster.device)
    problems = [*out_of_range(config), *model_folder(config)]
    if device is Device.cuda and not machine.has_cuda:
        problems.append(
            "cluster.device=cuda: the run was on GPUs, and this machine has none that torch can "
            "use; cluster.device=cpu redoes the step here"
        )
    if problems:
        raise ConfigError.of(problems)
    layout = resolve_layout(config, device)
    model = read_model_spec(config.model.path)
    problems += [*pair_problems(config, device, "sft"), *recompute_problems(config)]
    problems += [*model_splits(config, model, "sft")]
    problems += experts(config, model, layout.actor)
    ranks = layout.actor.data_parallel
    for one in (config, other or config):
        minibatches = one.algorithm.minibatches_per_step
        if sequences < minibatches * ranks:
            problems.append(
                f"the step has {sequences} sequences: algorithm.minibatches_per_step={minibatches} "
                f"x {ranks} data-parallel ranks needs {minibatches * ranks}"
            )
            break
    if problems:
        raise ConfigError.of(problems)
    return layout


def _is_setting(key: str) -> bool:
    return key in by_key() or is_open(key)


def _unknown(text: str) -> Iterator[str]:
    """Why it is no setting, in the words of the settings' own check."""
    try:
        with_values({}, [text])
    except ConfigError as error:
        yield str(error)


def _refusal(text: str, key: str) -> str:
    why = {
        "actor.optimizer.": "it changes no gradient, and the run's optimizer has its state",
        "value.optimizer.": "it changes no gradient, and the run's optimizer has its state",
        "actor.lora.": "the run's checkpoints have its adapters, or none",
        "actor.offload": "without engines there is nothing to make room for",
        "actor.routing_replay": "ranks are built with it, and the run's were as they were",
        "cluster.placement": "there are no engines to place",
        "algorithm.reference.": "the reference model is the run's",
        "algorithm.kl_": "only later steps would notice it",
        "algorithm.entropy_coef_": "only later steps would notice it",
        "value.warmup_steps": "it decides which steps update the policy, not how",
    }
    reason = next(
        (said for start, said in why.items() if key.startswith(start)),
        "it is about what was sampled or how it was rewarded, and a replay samples nothing",
    )
    return (
        f"{text}: {reason}; a replay takes settings of the update (algorithm.loss, "
        "algorithm.correction.kind, value.lam, ...) and of the layout (actor.tensor_parallel, "
        "cluster.device, ...)"
    )


def _of_algorithm(config: Config) -> Iterator[str]:
    yield from (one for one in names(config) if one.startswith("algorithm."))
    yield from out_of_range(config)
    yield from algorithm_problems(config)
    yield from routing_problems(config)


def _without_models(source: Source, config: Config, other: Config) -> Iterator[str]:
    before, now = config.algorithm, other.algorithm
    if needs_value_model(now.advantage) and not needs_value_model(before.advantage):
        yield (
            f"algorithm.advantage={now.advantage}: needs the values of a value model, and the run "
            f"(algorithm.advantage={before.advantage}) trained none"
        )
    if now.kl_coef > 0 and before.kl_coef == 0 and before.reference.kind.value != "frozen":
        yield (
            f"algorithm.kl_coef={now.kl_coef}: the run had no reference model, and "
            f"algorithm.reference.kind={before.reference.kind.value} would have changed in its "
            "course"
        )
    if now.distill_coef > 0 and before.distill_coef == 0:
        yield (
            f"algorithm.distill_coef={now.distill_coef:g}: needs a teacher's log-probs of the "
            "step's samples, and the run (algorithm.distill_coef=0) kept none"
        )
    if now.advantage == "teacher" and now.distill_coef == 0:
        yield (
            "algorithm.advantage=teacher: algorithm.distill_coef=0 leaves nothing to learn; give "
            "another advantage with it"
        )
    warmup = other.value.warmup_steps
    for one in (before, now):
        if needs_value_model(one.advantage) and source.step <= warmup:
            yield (
                f"step {source.step}: value.warmup_steps={warmup}: the step trains the value model "
                "alone, so there is no policy update to compare"
            )
            break


def _model_folder(config: Config, run_dir: Path) -> Path:
    """The one of the settings; or the run's own, if the run's folder was moved."""
    path = Path(config.model.path)
    own = run_dir / "model"
    moved = not path.is_dir() and path.name == own.name and own.is_dir()
    return (own if moved else path).absolute()
