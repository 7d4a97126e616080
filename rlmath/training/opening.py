"""Ranks and engines of a command, started side by side and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.actor.group import ActorGroup
from rlmath.actor.settings import ActorSettings
from rlmath.cluster.grading_nodes import node_workers
from rlmath.cluster.nodes import refuse_idle_gpus
from rlmath.cluster.placement import Places, place
from rlmath.cluster.session import ray_session
from rlmath.config.arithmetic import RunLayout, resolve_layout
from rlmath.config.reward import RewardConfig, WorkersOn
from rlmath.config.rollout import has_turns
from rlmath.config.schema import Config, Device, OnRewardError
from rlmath.data import load_tokenizer
from rlmath.device import choose_platform
from rlmath.device.residue import check_engine_room
from rlmath.engines.requests import EngineSpec
from rlmath.environments.chosen import Chosen
from rlmath.grading import MathGrader
from rlmath.grading.settings import workers_for
from rlmath.model.folder import TINY
from rlmath.model.spec import read_model_spec
from rlmath.monitor.startup import StartLog
from rlmath.rewards.mix import RewardMix
from rlmath.rollout.collect import Collector
from rlmath.rollout.episodes import Episodes
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.sampling import Sampling
from rlmath.rollout.teacher import EngineTeacher, Teacher, TeacherScores
from rlmath.training.engine_settings import (
    engine_spec,
    pool_of,
    server_teacher,
    teacher_path,
    teacher_spec,
)
from rlmath.training.rank_settings import LOGS, log_dir, nsys_folder, rank_threads, training_ranks
from rlmath.training.trainer import ActorTrainer
from rlmath.types import Problem


@dataclass(frozen=True)
class RunningRanks:
    """Megatron ranks that are ready."""

    config: Config  # With the model's path resolved.
    layout: RunLayout  # Ranks and engines.
    actor: ActorGroup


@dataclass(frozen=True)
class Running(RunningRanks):
    """Ranks and engines that are ready, and connected."""

    sampling: Sampling  # Engines and rewards.
    teacher: TeacherScores | None = None  # Scores the samples; None: there is none.


@contextlib.contextmanager
def open_ranks(
    config: Config, settings: Callable[[Config, RunLayout], ActorSettings]
) -> Iterator[RunningRanks]:
    """Start ranks alone. ``config``: checked settings. ``settings``: makes the ranks' settings from
    the configuration and the layout. Raises UserError: the model, the cluster or the machine does
    not allow it."""
    machine = _machine(config, trains=True)
    config, layout = machine.config, machine.layout
    with machine.place() as places:
        actor = _actor(machine, settings(config, layout), places)
        try:
            start(actor, None, machine.say)
            machine.say("ready")
            yield RunningRanks(config, layout, actor)
        finally:
            actor.shutdown()


@contextlib.contextmanager
def open_engines(config: Config, problems: Iterable[Problem] = ()) -> Iterator[Sampling]:
    """Start engines and rewards alone. ``config``: checked settings. ``problems``: those to
    sample; the rewards' parameters are checked against their columns. Raises UserError: the model,
    the cluster or the machine does not allow it."""
    machine = _machine(config, trains=False)
    config = machine.config
    with contextlib.ExitStack() as stack:
        rewards = stack.enter_context(_checked_rewards(config, problems))
        episodes = _episodes(config, stack)
        places = stack.enter_context(machine.place())
        spec = _engine_spec(machine, trains=False)
        pool = pool_of(config, spec, machine.layout.engines, places.engines, None, episodes)
        stack.callback(pool.shutdown)
        start(None, pool, machine.say)
        yield _sampling(machine, pool, rewards, stack)


@contextlib.contextmanager
def open_training(
    config: Config, *, problems: Iterable[Problem] = (), engines_read: bool = True
) -> Iterator[Running]:
    """Start the parts of reinforcement learning; see :func:`start` for the order. Raises UserError:
    the model, the cluster or the machine does not allow it.

    Args:
        problems: To be sampled: the rewards' parameters are checked against their columns.
        engines_read: Engines read the model's weights; else the caller sends them all before they
            sample.
    """
    distills = config.algorithm.distill_coef > 0
    machine = _machine(config, trains=True, distills=distills)
    config, layout, say = machine.config, machine.layout, machine.say
    with contextlib.ExitStack() as stack:
        rewards = stack.enter_context(_checked_rewards(config, problems))
        teacher = server_teacher(config) if distills else None
        if teacher is not None:
            teacher.probe()
        episodes = _episodes(config, stack)
        places = stack.enter_context(machine.place())
        spec = _engine_spec(machine, trains=True)
        spec = dataclasses.replace(spec, reads_weights=engines_read)
        settings = training_ranks(config, layout)
        actor = _actor(
            machine, settings, places, shares_gpus=spec.sleeps, nsys_folder=nsys_folder(config)
        )
        trainer = ActorTrainer(config, spec, actor)
        pool = pool_of(config, spec, layout.engines, places.engines, trainer, episodes)
        stack.callback(pool.shutdown)
        teacher_pool = _launched_teachers(machine, places, stack)
        stack.callback(actor.shutdown)
        start(actor, pool, say)
        if teacher_pool is not None:
            teacher = _engine_teacher(machine, teacher_pool)
        say("sending the weights from the ranks to the engines")
        pool.connect()
        sampling = _sampling(machine, pool, rewards, stack)
        if teacher is not None:
            stack.callback(teacher.close)
        scores = None if teacher is None else TeacherScores(teacher)
        yield Running(config, layout, actor, sampling, scores)


@dataclass(frozen=True)
class _Machine:
    """Where a command runs, before anything is started there."""

    config: Config
    layout: RunLayout
    say: StartLog

    @contextlib.contextmanager
    def place(self) -> Iterator[Places]:
        """Ray, with accelerators for ranks and engines."""
        cluster, device = self.config.cluster, self.layout.device
        self.say("starting Ray")
        with ray_session(cluster):
            joins = cluster.ray_address is not None
            if joins and device is Device.cpu and cluster.device is Device.auto:
                refuse_idle_gpus()
            with place(self.layout, cluster.nodes) as places:
                yield places


def _machine(config: Config, *, trains: bool, distills: bool = False) -> _Machine:
    config = with_model_folder(config)
    # Without ranks there are no layers that would matter.
    layers = config.actor.layers.value if trains else "any"
    joins = config.cluster.ray_address is not None
    platform = choose_platform(config.cluster.device.value, layers, elsewhere=joins)
    platform.prepare_driver()
    layout = resolve_layout(config, Device(platform.name))
    if not distills:  # There is nothing to score.
        layout = dataclasses.replace(layout, teacher_engines=0)
    return _Machine(config, layout, StartLog(Path(config.runner.run_dir) / LOGS))


def _actor(
    machine: _Machine,
    settings: ActorSettings,
    places: Places,
    *,
    shares_gpus: bool = False,
    nsys_folder: Path | None = None,
) -> ActorGroup:
    config, layout = machine.config, machine.layout
    return ActorGroup(
        settings,
        layout.actor,
        device=layout.device.value,
        seed=config.runner.seed,
        num_threads=rank_threads(config, layout),
        log_dir=str(log_dir(config)),
        actor_options=places.actor_ranks,
        shares_gpus=shares_gpus,
        nsys_folder=nsys_folder,
    )


def _engine_spec(machine: _Machine, *, trains: bool) -> EngineSpec:
    spec = engine_spec(machine.config, machine.layout, trains=trains)
    if machine.layout.device is Device.cuda:
        whose = "FlashInfer's" if spec.flashinfer else "vLLM's own"
        machine.say(f"engines use {whose} kernels (rollout.flashinfer={spec.flashinfer})")
    return spec


def _launched_teachers(
    machine: _Machine, places: Places, stack: contextlib.ExitStack
) -> RolloutPool | None:
    """Engines of the teacher, which start meanwhile; ``None``: it is on a server, or absent."""
    config, layout = machine.config, machine.layout
    if not layout.teacher_engines:
        return None
    spec = teacher_spec(config, layout)
    pool = pool_of(config, spec, layout.teacher_engines, places.teachers)
    stack.callback(pool.shutdown)
    pool.launch()
    return pool


def _engine_teacher(machine: _Machine, pool: RolloutPool) -> Teacher:
    machine.say("waiting for the teacher's engines")
    pool.wait_until_ready()
    return EngineTeacher(pool, read_model_spec(teacher_path(machine.config)).vocab)


def _episodes(config: Config, stack: contextlib.ExitStack) -> Episodes | None:
    """Answers of the model's turns, until the stack's end; ``None``: each response is one turn.
    Raises UserError: no sandbox works on this machine, or the model has no tokenizer."""
    rollout = config.rollout
    if not has_turns(rollout):
        return None
    tokenizer, chosen = load_tokenizer(config.model.path), Chosen(rollout)
    turn_format = chosen.format_of(config, tokenizer)
    parallel = rollout.parallel_calls or os.cpu_count() or 1
    episodes = Episodes(
        chosen.environment(turn_format, parallel),
        turn_format,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        max_turns=rollout.max_turns,
        wall_s=rollout.tools_timeout_s,
        parallel=parallel,
    )
    stack.callback(episodes.close)
    return episodes


def _sampling(
    machine: _Machine, pool: RolloutPool, rewards: RewardMix, stack: contextlib.ExitStack
) -> Sampling:
    """Ready engines, with grader and rewards."""
    reward = machine.config.reward
    if reward.workers_on is WorkersOn.engines and rewards.grader is not None:
        machine.say("starting the grading workers on the engines' nodes")
        grade_there(rewards.grader, pool.engines, reward, stack)
    collector = Collector(rewards)
    stack.callback(collector.close)
    machine.say("ready")
    return Sampling(pool, rewards, collector)


@contextlib.contextmanager
def _checked_rewards(config: Config, problems: Iterable[Problem]) -> Iterator[RewardMix]:
    """The rewards, which accept the problems' columns and answer."""
    with reward_mix(config) as rewards:
        rewards.check_columns(problems)
        rewards.probe()
        yield rewards


def start(actor: ActorGroup | None, pool: RolloutPool | None, say: StartLog) -> None:
    """Start ranks and engines, side by side unless they share GPUs.

    vLLM sizes its KV cache by the GPU's free memory before and after a trial run, and its check at
    the start asks for all of ``rollout.gpu_memory_utilization`` to be free. Both mean something
    only while the ranks on that GPU hold what they hold for good and allocate nothing: engines on
    the ranks' GPUs start when all ranks are ready and have given back memory that they do not use.
    What needs no GPU, their processes and imports, they do meanwhile: ten seconds and more.
    A GPU has one engine, so no two measure at once.

    Raises:
        UserError: The model cannot be built or read, the ranks and their communicators leave too
            little of a GPU, or an engine cannot start.
        ActorError: A rank failed in another way.
    """
    engines = "" if pool is None else "the vLLM engines"
    ranks = "" if actor is None else "the Megatron ranks with model and weights"
    if actor is None or pool is None or not pool.spec.sleeps:
        say("starting " + " and ".join(one for one in (engines, ranks) if one), logs=True)
        if pool is not None:
            pool.launch()
        if actor is not None:
            actor.launch()
            actor.wait_until_ready(say)
            if pool is not None:
                say("the ranks are ready; waiting for the engines")
    else:
        say(f"starting {ranks}", logs=True)
        pool.prepare()
        actor.launch()
        actor.wait_until_ready(say)
        check_engine_room(actor.release_cached_memory(), pool.spec.gpu_memory_utilization)
        say(f"the ranks are ready; starting {engines}")
        pool.launch()
    if pool is not None:
        pool.wait_until_ready()


def with_model_folder(config: Config) -> Config:
    """The settings with ``model.path=tiny`` replaced by the folder of a tiny model made for it."""
    if config.model.path != TINY:
        return config
    from rlmath.model.tiny import make_tiny_model

    folder = Path(config.runner.run_dir) / "model"
    if not (folder / "config.json").exists():
        make_tiny_model(folder, seed=config.runner.seed)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))


@contextlib.contextmanager
def reward_mix(config: Config) -> Iterator[RewardMix]:
    """The rewards that ``reward`` describes, with the grader that they share.

    Now and then the grader has SymPy check what its fast layers decided; where the two disagree,
    ``run_dir/grading_disagreements.jsonl`` says so.
    """
    reward = config.reward
    grader = MathGrader(
        reward.num_workers or workers_for(len(os.sched_getaffinity(0))),
        reward.timeout_s,
        fallback=reward.fallback.value,
        disagreement_path=str(Path(config.runner.run_dir) / "grading_disagreements.jsonl"),
        verifier=reward.verifier,
        verifier_options=reward.verifier_options,
    )
    with (
        contextlib.closing(grader),
        RewardMix.from_config(
            reward.items,
            correct=reward.correct,
            incorrect=reward.incorrect,
            grader=grader,
            on_error="raise" if reward.on_error is OnRewardError.stop else "none",
            # A reward written for TRL gets message lists when the prompts are chats, as there.
            completion_format="chat" if config.data.apply_chat_template else "text",
        ) as mix,
    ):
        grader.check_verifier()
        yield mix


def grade_there(
    grader: MathGrader, engines: Sequence[Any], reward: RewardConfig, stack: contextlib.ExitStack
) -> None:
    """Give the grader workers on the nodes of these engines, until the stack's end."""
    workers = node_workers(grader.settings, engines, reward.num_workers)
    stack.callback(workers.close)
    grader.use_workers(workers)
