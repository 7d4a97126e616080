"""``rlmath plan schedule``: which schedule of a run is fastest, by simulation."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rlmath.commands.plan import cli as layout_cli
from rlmath.commands.plan.advice import plans_or_advice
from rlmath.commands.plan.engine_memory import engine_weights_bytes, kv_bytes
from rlmath.commands.plan.layouts import Plan, find_plans
from rlmath.commands.plan.report import not_trained
from rlmath.commands.plan.schedule.lengths import (
    Lengths,
    budgets,
    lengths_of_run,
    log_normal_lengths,
)
from rlmath.commands.plan.schedule.simulation import Choice, Outcome, Setup, Times, simulate
from rlmath.commands.plan.time import ALL_REDUCES_PER_LAYER, forward_flops
from rlmath.commands.plan.wish import Wish
from rlmath.config.command_line import Given, count
from rlmath.config.rollout import RolloutSchedule
from rlmath.config.schema import Config
from rlmath.errors import UserError

SETTINGS = layout_cli.SETTINGS
# Shares of the responses that keep within the budgets that are tried.
BUDGET_SHARES = (0.5, 0.75, 0.9)
LAGS = (1, 2, 4)
# Shares of the GPUs that engines get where they do not share them with the actor.
ENGINE_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
# Ranks of an engine that are tried.
ENGINE_WIDTHS = (1, 2, 4, 8)
# Below, starting processes costs more than it gains.
PARALLEL_FROM_SAMPLES = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command besides its settings: those of ``plan layout``, and its own."""
    layout_cli.add_arguments(parser)
    add = parser.add_argument
    add("--run", type=Path, metavar="RUN", help="use the response lengths of this run's samples")
    add("--steps", type=count, default=4, metavar="N", help="steps to simulate (default: 4)")


def run(arguments: argparse.Namespace, given: Given) -> int:
    """Print each schedule's figures, the fastest first.

    Raises:
        UserError: No layout fits, or the run has no samples.
    """
    wish, plans = plans_or_advice(layout_cli.wish_of(arguments, given))
    plan, work = plans[0], wish.work
    steps = arguments.steps
    if arguments.run is not None:
        lengths = lengths_of_run(arguments.run, work.group_size)
    else:
        problems = work.prompts * (steps + max(LAGS) + 2)
        mean, longest = work.mean_response_tokens, work.response_tokens
        lengths = log_normal_lengths(problems, work.group_size, mean, longest)
    setup = setup_of(wish, plan, lengths)
    setups = {plan.engine_tp: setup}
    for other in other_widths(wish, plan):
        setups[other.engine_tp] = setup_of(wish, other, lengths)
    choices = [Choice()]
    for budget in budgets(lengths, BUDGET_SHARES):
        choices += [Choice.carry_over(budget, lag) for lag in LAGS]
    choices += [Choice.pipelined(engines) for engines in splits(setup.engines)]
    play = functools.partial(_play, given.config, setups, plan.engine_tp, steps)
    with players(work.prompts * work.group_size * steps) as play_all:
        outcomes = list(play_all(play, choices))
        outcomes += play_all(play, continuous_choices(outcomes, setup.engines))
        widths = {ranks: one.engines for ranks, one in setups.items()}
        samples = work.prompts * work.group_size
        others = other_width_choices(outcomes, plan.engine_tp, widths)
        outcomes += play_all(play, [one for one in others if has_room(one, setups, samples)])
    outcomes.sort(key=lambda one: one.step_s)
    if arguments.json:
        print(json.dumps(as_json(wish, plan, setup, outcomes), indent=1))
    else:
        print(as_text(wish, plan, setup, outcomes))
    return 0


Players = Callable[[Callable[[Choice], Outcome], Sequence[Choice]], Iterable[Outcome]]


@contextlib.contextmanager
def players(samples: int) -> Iterator[Players]:
    """Plays choices, in as many processes as there are cores if there is much to play.

    Args:
        samples: Of a play.
    """
    if samples < PARALLEL_FROM_SAMPLES:
        yield map
        return
    with ProcessPoolExecutor() as processes:
        yield processes.map


def continuous_choices(outcomes: Iterable[Outcome], engines: int) -> list[Choice]:
    """The continuous schedule at the split of GPUs at which pipelining is fastest, and beside it.

    Args:
        outcomes: Of the pipelined choices, among others.
        engines: That the GPUs have room for.
    """
    tried = splits(engines)
    ahead = [one for one in outcomes if one.choice.schedule is RolloutSchedule.pipelined]
    if not ahead:
        return []
    best = tried.index(min(ahead, key=lambda one: one.step_s).choice.engines or 0)
    near = tried[max(0, best - 1) : best + 2]
    return [Choice.continuous(count, lag) for count in near for lag in LAGS]


def other_widths(wish: Wish, plan: Plan) -> list[Plan]:
    """The plan with engines of other tensor-parallel sizes on the same GPUs, where they fit; none
    if the size was given."""
    if wish.engine_tp is not None:
        return []
    split = plan.actor.layout
    found = []
    for ranks in ENGINE_WIDTHS:
        if ranks == plan.engine_tp or ranks > min(wish.gpus, wish.gpus_per_node):
            continue
        one = dataclasses.replace(
            wish,
            engine_tp=ranks,
            tp=split.tensor_parallel,
            pp=split.pipeline_parallel,
            cp=split.context_parallel,
            ep=split.expert_parallel,
        )
        with contextlib.suppress(UserError):
            found.append(find_plans(one)[0])
    return found


def other_width_choices(
    outcomes: Iterable[Outcome], usual: int, widths: Mapping[int, int]
) -> list[Choice]:
    """Of each schedule the fastest choice, with engines of the other widths on as many GPUs.

    Args:
        outcomes: With engines of the usual width.
        usual: Ranks of these.
        widths: By the ranks of an engine, how many engines all GPUs have room for.
    """
    found = []
    for schedule in RolloutSchedule:
        of_schedule = [one for one in outcomes if one.choice.schedule is schedule]
        if not of_schedule:
            continue
        best = min(of_schedule, key=lambda one: one.step_s).choice
        for ranks, room in widths.items():
            engines = None if best.engines is None else best.engines * usual // ranks
            if ranks != usual and (engines is None or 0 < engines < room):
                found.append(dataclasses.replace(best, engines=engines, engine_ranks=ranks))
    return found


def has_room(choice: Choice, setups: Mapping[int, Setup], samples: int) -> bool:
    """Whether the engines run at least half of the samples that may be live at once.

    Where fewer run, most wait in the queue, and playing a step takes minutes.

    Args:
        choice: With the engines' width.
        setups: By width.
        samples: Of a step.
    """
    setup = setups[choice.engine_ranks or min(setups)]
    running = (choice.engines or setup.engines) * setup.capacity
    return 2 * running >= (choice.max_lag + 1) * samples


def _play(
    config: Config, setups: Mapping[int, Setup], usual: int, steps: int, choice: Choice
) -> Outcome:
    """Play a choice with engines of its width."""
    return simulate(config, setups[choice.engine_ranks or usual], choice, steps)


def splits(engines: int) -> list[int]:
    """How many of the engines that the GPUs have room for are tried beside an actor."""
    return sorted({round(share * engines) for share in ENGINE_SHARES} - {0, engines})


def setup_of(wish: Wish, plan: Plan, lengths: Lengths) -> Setup:
    """Engines and times of the fastest layout; see ``time.decoding`` for the formula."""
    spec, gpu, efficiency, tp = wish.spec, wish.gpu, wish.efficiency, plan.engine_tp
    bandwidth = gpu.memory_gb_per_s * 1e9 * efficiency.decode_bandwidth
    latency = efficiency.all_reduce_s * ALL_REDUCES_PER_LAYER * spec.layers if tp > 1 else 0.0
    peak = tp * gpu.peak_tflops * 1e12 * efficiency.mfu
    mean = float(lengths.tokens.mean())
    trained_s = plan.seconds["log_probs"] + plan.seconds["update"]
    times = Times(
        step_s=engine_weights_bytes(spec, tp, wish.quantized) / bandwidth
        + latency
        + efficiency.decode_step_s,
        token_s=kv_bytes(spec, tp) / bandwidth,
        prefill_token_s=forward_flops(spec, wish.work.mean_tokens) / peak,
        train_token_s=trained_s / wish.work.tokens,
        fixed_s=plan.seconds["weight_sync"] + plan.seconds["offload"],
    )
    held = wish.work.prompt_tokens + mean
    capacity = max(1, min(wish.max_running, int(plan.cache_tokens // held)))
    return Setup(plan.engines, capacity, wish.work.prompt_tokens, lengths, times)


def as_json(wish: Wish, plan: Plan, setup: Setup, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Everything: what was asked, what was assumed, and each schedule, the fastest first."""
    tokens = setup.lengths.tokens
    return {
        "simulated": True,
        "model": wish.path,
        "gpus": wish.gpus,
        "engines": setup.engines,
        "engine_tensor_parallel": plan.engine_tp,
        "running_sequences": setup.capacity,
        "mean_response_tokens": float(tokens.mean()),
        "longest_response_tokens": int(tokens.max()),
        "times": dataclasses.asdict(setup.times),
        "warnings": not_trained(wish.spec, wish.gpu),
        "schedules": [_outcome(one) for one in outcomes],
    }


def _outcome(one: Outcome) -> dict[str, object]:
    choice = dataclasses.asdict(one.choice) | {"schedule": one.choice.schedule.name}
    return dataclasses.asdict(one) | {"choice": choice, "settings": one.choice.settings}


def as_text(wish: Wish, plan: Plan, setup: Setup, outcomes: Sequence[Outcome]) -> str:
    """A table, and what to set."""
    tokens, work = setup.lengths.tokens, wish.work
    lines = [
        f"{wish.path} on {wish.gpus} x {wish.gpu.name}: {work.prompts} x {work.group_size} samples "
        f"of {tokens.mean():,.0f} tokens on average, {tokens.max():,} at most; {setup.engines} "
        f"engines of {plan.engine_tp} GPUs, {setup.capacity} sequences at once. Simulated.",
        "",
        f"{'schedule':<11} {'tokens':>7} {'lag':>4} {'engines':>8} {'TP':>3} "
        f"{'step s':>8} "
        f"{'generate':>9} "
        f"{'idle':>6} {'actor idle':>11} {'tokens/s':>10} {'mean lag':>9} {'p99':>4} {'mixed':>6} "
        f"{'read again':>11}",
    ]
    for one in outcomes:
        choice = one.choice
        budget = "" if choice.budget_tokens is None else str(choice.budget_tokens)
        lag = str(choice.max_lag or "")
        ranks = choice.engine_ranks or plan.engine_tp
        engines = choice.engines or setup.engines * plan.engine_tp // ranks
        lines.append(
            f"{choice.schedule.name:<11} {budget:>7} {lag:>4} {engines:>8} {ranks:>3} "
            f"{one.step_s:8.1f} {one.generate_s:9.1f} {one.idle_share:6.1%} "
            f"{one.actor_idle_share:11.1%} {one.tokens_per_s:10,.0f} {one.lag_mean:9.2f} "
            f"{one.lag_p99:4.0f} {one.mixed_share:6.1%} {one.recomputed_share:11.1%}"
        )
    base = next(one for one in outcomes if one.choice == Choice())
    best = outcomes[0]
    lines.append("")
    if best is base:
        lines.append("No other schedule is faster.")
    else:
        gain = best.tokens_per_s / base.tokens_per_s
        lines.append(f"The fastest trains {gain:.2f} times the tokens per second of synchronous:")
        with_ranks = dataclasses.replace(
            best.choice, engine_ranks=best.choice.engine_ranks or plan.engine_tp
        )
        lines.append("  " + " ".join(with_ranks.settings))
    lines += [f"warning: {text}" for text in not_trained(wish.spec, wish.gpu)]
    return "\n".join(lines)
