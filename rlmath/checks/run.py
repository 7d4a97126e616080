"""Every check of the settings, before anything starts: in seconds, and all problems at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from rlmath.algorithms.advantages import needs_value_model
from rlmath.checks import attempts
from rlmath.checks import files as check_files
from rlmath.checks import layout as check_layout
from rlmath.checks import precision as check_precision
from rlmath.checks.algorithm import algorithm_problems
from rlmath.checks.benchmarks import benchmark_problems
from rlmath.checks.engine_parts import engine_argument_problems, transport_problems
from rlmath.checks.fp8_training import fp8_model, fp8_problems
from rlmath.checks.latent import latent_problems
from rlmath.checks.linear_attention import linear_attention_problems, linear_engine_problems
from rlmath.checks.lora import lora_model, lora_problems, unmerged_model, unmerged_problems
from rlmath.checks.machine import Machine, ray_folder_problem
from rlmath.checks.mirror import mirror_problems
from rlmath.checks.overwritten import overwritten_inputs
from rlmath.checks.pairs import pair_problems, unused_problems
from rlmath.checks.profile import profile_problems
from rlmath.checks.quantization import (
    cpu_kv_cache_in_fp8,
    quantization_model,
    quantization_problems,
)
from rlmath.checks.recompute import recompute_model, recompute_problems
from rlmath.checks.routing import routing_model, routing_problems
from rlmath.checks.shared_prompts import share_prompts
from rlmath.checks.teacher import teacher_problems
from rlmath.checks.tools import tool_problems
from rlmath.checks.trackers import tracker_problems
from rlmath.config import arithmetic
from rlmath.config.collapse import DETECTORS
from rlmath.config.options import SECTIONS
from rlmath.config.removed import removed_value
from rlmath.config.rollout import overlap_of
from rlmath.config.schema import Config, Device, OptimizerConfig, Placement, RewardItem, Schedule
from rlmath.config.settings import by_key, out_of_range, value_of
from rlmath.errors import ConfigError, ModelError
from rlmath.model.hub import is_hub_model
from rlmath.model.published import published_spec
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.plugins import Registry
from rlmath.plugins.source import split
from rlmath.rewards.registry import available_rewards, has_own_grader, reward_class, settings_of
from rlmath.utils.close_names import did_you_mean

Command = Literal["train", "sft", "evaluate"]
_REGISTRIES: dict[str, Registry[Any, Any]] = {
    section.chooser: section.registry for section in SECTIONS
}


def check(config: Config, command: Command = "train", machine: Machine | None = None) -> None:
    """Refuse settings that cannot work. ``command``: the command, which decides the files to check.
    ``machine``: the machine that the run starts on; ``None``: this one. Raises ConfigError: one
    line for each problem."""
    problems = list(find_problems(config, command, machine or Machine.here()))
    if problems:
        raise ConfigError.of(problems)


def find_problems(config: Config, command: Command, machine: Machine) -> Iterator[str]:
    wrong_numbers = list(out_of_range(config))
    yield from wrong_numbers
    yield from names(config)
    for setting in ("stop_on", "rollback_on"):
        for name in getattr(config.collapse, setting):
            if name not in DETECTORS:
                known = ", ".join(DETECTORS)
                yield f"collapse.{setting}: no detector is called {name!r}; there are {known}"
    yield from tracker_problems(config)
    yield from mirror_problems(config, command)
    yield from _contradictions(config, command)
    device = machine.device(config.cluster.device)
    yield from pair_problems(config, device, command)
    yield from _cluster(config, machine, device)
    if command != "evaluate":
        yield from check_precision.layers(config, machine, device)
    yield from check_precision.batch_invariance(config, machine, device, command)
    yield from check_precision.context_attention(config, device, command)
    yield from fp8_problems(config, machine, device, command)
    yield from check_files.data_files(config, command)
    yield from check_files.model_folder(config)
    yield from check_files.run_dir(config)
    yield from overwritten_inputs(config, command)
    if command == "train" or (command == "sft" and config.sft.save_every):
        yield from check_files.resume(config)
    yield from _accepted_changes(config)
    if command == "train":
        yield from profile_problems(config, machine)
        yield from teacher_problems(config, device)
        yield from unmerged_problems(config, device)
    if command != "sft":
        yield from tool_problems(config)
        yield from quantization_problems(config, command)
    if command != "evaluate":
        yield from attempts.refusals(config, command)
        yield from check_layout.forward_budget(config)
    model = known_model(config)
    yield from share_prompts(config, model, device, command)
    layout = None
    try:
        # Sizes that are not positive cannot be divided by.
        if not any(out_of_range(config, int)):
            layout = arithmetic.resolve_layout(config, device)
    except ConfigError as error:
        yield str(error)
    if wrong_numbers:
        return
    if layout is not None:
        yield from check_layout.batch_divides(config, layout, command)
        yield from check_layout.tensor_groups_have_nodes(config, layout, command)
        if command != "evaluate":
            yield from check_layout.gradient_copies(config, layout)
    if command != "sft":
        yield from check_layout.engine_steps(config, device)
    if model is not None and command != "sft":
        yield from quantization_model(config, model)
        yield from linear_engine_problems(config, model, device)
    if model is not None:
        yield from check_layout.model_splits(config, model, command)
        yield from check_precision.batch_invariant_model(config, model)
        yield from latent_problems(model, device, command)
        if command != "evaluate":
            yield from lora_model(config, model)
            yield from recompute_model(config, model)
        if command == "train":
            yield from unmerged_model(config, model)
            yield from routing_model(config, model)
        yield from check_layout.lengths(config, model, command)
        if layout is not None and command != "evaluate":
            yield from check_layout.experts(config, model, layout.actor)
            yield from fp8_model(config, model, layout.actor)
            yield from linear_attention_problems(config, model, layout.actor)
        if device is Device.cpu:
            if command != "sft":
                yield from cpu_kv_cache_in_fp8(config, model)
            yield from check_layout.cpu_attention(model, command)
            yield from check_layout.kv_cache(config, model, command)
        if layout is not None and device is Device.cuda and command == "train":
            yield from check_layout.windows(config, model, layout)
        if layout is not None and device is Device.cpu:
            yield from check_files.memory(config, model, layout, machine, command)
        if command != "evaluate":
            yield from check_files.disk(config, model, machine, command)


def _accepted_changes(config: Config) -> Iterator[str]:
    """Each entry names a setting or a section that a resume refuses to change."""
    keys = by_key()
    for name in config.runner.accept_changes:
        known = any(key == name or key.startswith(name + ".") for key in keys)
        guarded = any(
            name == section or name.startswith(section + ".") or section.startswith(name + ".")
            for section in attempts.GUARDED
        )
        if not known:
            yield f"runner.accept_changes: there is no setting {name}{did_you_mean(name, keys)}"
        elif not guarded:
            yield (
                f"runner.accept_changes: {name} may be changed without being listed; the list is "
                f"for {', '.join(attempts.GUARDED)}"
            )


def known_model(config: Config) -> ModelSpec | None:
    """The model's sizes; ``None`` when ``model_folder`` has already said what is wrong, or when the
    sizes of a model that is still on the hub are not known."""
    if is_hub_model(config.model.path):
        return published_spec(config.model.path)
    try:
        return read_model_spec(config.model.path)
    except ModelError:
        return None


def names(config: Config) -> Iterator[str]:
    """A message for each name that nothing is registered under."""
    for key, registry in _REGISTRIES.items():
        name = value_of(config, key)
        if name in (None, "auto"):
            continue
        if removed := removed_value(key, name):
            yield f"{key}={name}{removed}"
            continue
        if split(name)[1]:
            yield from registry.problems(name)
        elif not registry.has(name):
            known = registry.names()
            among = (
                f"{_among(name, known)}, or file.py:function"
                if known
                else ("give file.py:function, or import the file that registers it with plugins")
            )
            yield f"{key}={name}: there is none of that name; {among}"
    if not config.reward.items:
        yield "reward.items=[]: at least one reward is needed, such as [{name: math}]"
    for index, item in enumerate(config.reward.items):
        key = f"reward.items[{index}]"
        if config.reward.verifier is not None and has_own_grader(item.name, item.params):
            yield (
                f"{key}.params: an item with its own grader does not use reward.verifier="
                f"{config.reward.verifier}; leave out {', '.join(item.params)}, or the verifier"
            )
        if item.name in available_rewards():
            yield from _reward_params(key, item)
        else:
            yield from _reward_path(f"{key}.name={item.name}", item.name)


def _reward_params(key: str, item: RewardItem) -> Iterator[str]:
    if not item.params:
        return
    known = settings_of(reward_class(item.name))
    for name in sorted(set(item.params) - set(known)):
        names = _among(name, [*known]) if known else "it has none"
        yield f"{key}.params.{name}: reward {item.name} has no such setting; {names}"
    for name in sorted(set(item.params) & set(known)):
        value, types = item.params[name], known[name]
        # In Python a bool is an int; in YAML it is not.
        fits = isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
        if types and not fits and not (float in types and type(value) is int):
            wanted = " or ".join("null" if one is NoneType else one.__name__ for one in types)
            yield f"{key}.params.{name}={value}: reward {item.name} expects {wanted} here"


def _reward_path(key: str, name: str) -> Iterator[str]:
    """Whether a reward given by file or import path can be there, without running its code."""
    place = name.rpartition(":")[0] or name
    if name.startswith(("http://", "https://")):
        return
    if place.endswith(".py"):
        if not Path(place).expanduser().is_file():
            yield f"{key}: no such file: {place}"
    elif ":" in name or "." in name:
        top = place.split(".")[0]
        if top == "__main__":
            yield (
                f"{key}: __main__ is the script that runs now, which a run that is started or "
                "resumed elsewhere does not have; move the function to a separate file and give "
                "file.py:function"
            )
        elif importlib.util.find_spec(top) is None:
            yield (
                f"{key}: there is no module {top} on Python's path; put its folder on PYTHONPATH "
                "or give the file: file.py:function"
            )
    else:
        yield (
            f"{key}: there is no reward of that name; {_among(name, available_rewards())}, "
            "package.module:function, or file.py:function"
        )


def _among(name: str, known: Sequence[str]) -> str:
    return f"there are {', '.join(known)}{did_you_mean(name, known)}"


def _contradictions(config: Config, command: Command) -> Iterator[str]:
    data, reward = config.data, config.reward
    if data.system_prompt is not None and data.apply_chat_template is False:
        yield "data.system_prompt: needs data.apply_chat_template=true, whose first message it is"
    if data.prompt_template is not None and "{prompt}" not in data.prompt_template:
        yield (
            f"data.prompt_template={data.prompt_template!r}: has no {{prompt}} in it, where the "
            "problem's text goes"
        )
    yield from benchmark_problems(config, command)
    if command == "evaluate":
        return
    yield from recompute_problems(config)
    yield from lora_problems(config, command)
    yield from _optimizers(config, command)
    if command == "sft":
        yield from unused_problems(config)
        return
    yield from algorithm_problems(config)
    yield from routing_problems(config)
    if any(item.name == "math" for item in reward.items) and reward.correct <= reward.incorrect:
        yield (
            f"reward.correct={reward.correct}: has to be more than reward.incorrect="
            f"{reward.incorrect}, or wrong answers are what is learned"
        )


def _optimizers(config: Config, command: Command) -> Iterator[str]:
    if command == "sft":
        yield from _optimizer("sft.optimizer", config.sft.optimizer, config.sft.steps)
        return
    if needs_value_model(config.algorithm.advantage):
        yield from _optimizer(
            "value.optimizer", config.value.optimizer, arithmetic.value_updates(config)
        )
        alone, steps = config.value.warmup_steps, config.runner.steps
        if alone > steps:
            yield (
                f"value.warmup_steps={alone}: the run has {steps} steps, in none of which the "
                f"policy would be trained; use at most {steps}, or more steps"
            )
        if alone >= steps:  # Values alone, for a run that is continued later.
            return
    yield from _optimizer(
        "actor.optimizer", config.actor.optimizer, arithmetic.policy_updates(config)
    )


def _optimizer(name: str, optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    warmup = optimizer.warmup_of(steps)
    if optimizer.schedule is Schedule.constant:
        if warmup >= steps:
            yield (
                f"{name}.warmup_steps={warmup}: the run has {steps} optimizer "
                f"steps, so it would end before the warm-up; use at most {steps - 1}, or more "
                "steps"
            )
        return
    if optimizer.min_lr > optimizer.lr:
        yield f"{name}.min_lr={optimizer.min_lr}: has to be at most {name}.lr={optimizer.lr}"
    decay = steps if optimizer.decay_steps is None else optimizer.decay_steps
    if warmup >= decay:
        what = "the run has" if optimizer.decay_steps is None else f"{name}.decay_steps is"
        yield (
            f"{name}.warmup_steps={warmup}: leaves nothing to decay in, {what} "
            f"{decay} optimizer steps; use at most {decay - 1}"
        )


def _cluster(config: Config, machine: Machine, device: Device) -> Iterator[str]:
    cluster = config.cluster
    local = cluster.ray_address is None
    if local and not machine.elsewhere and (problem := ray_folder_problem()):
        yield problem
    colocated = device is Device.cuda and cluster.placement is Placement.colocated
    overlap = overlap_of(config.rollout)
    if overlap.is_beside and colocated:
        yield (
            f"rollout.schedule={overlap.name}: engines sample while the actor trains, on GPUs of "
            "their own; set cluster.placement=separate, or use rollout.schedule=carry_over, which "
            "works on shared GPUs"
        )
    if cluster.nodes > 1 and local:
        yield (
            f"cluster.nodes={cluster.nodes}: a run over several nodes joins a Ray cluster that is "
            "already there; start it, and give cluster.ray_address (auto finds the one on this "
            "machine)"
        )
    if not local and cluster.object_store_mib is not None:
        yield (
            f"cluster.object_store_mib={cluster.object_store_mib}: does nothing, as the cluster at "
            "cluster.ray_address is running; give it to ray_utils/start_ray.sh "
            "(--object-store-mib), and leave it out here"
        )
    if device is Device.cuda and local:
        if not machine.has_cuda:
            why = (
                f"there is no NVIDIA GPU that this process may use, and torch is "
                f"{machine.torch_build}"
                if machine.gpus == 0
                else f"torch here is {machine.torch_build or 'not installed'}, without CUDA"
            )
            yield f"cluster.device=cuda: {why}; use cluster.device=cpu, or a machine with CUDA"
        elif cluster.gpus_per_node > machine.gpus:
            yield (
                f"cluster.gpus_per_node={cluster.gpus_per_node}: this machine has {machine.gpus} "
                f"that this process may use; use at most {machine.gpus}"
            )
    yield from transport_problems(config, device.value, colocated)
    yield from engine_argument_problems(config, device.value)
