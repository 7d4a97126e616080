"""Each ``rollout.schedule`` in real runs, and what the simulation says of the same runs.

The tiny model with Megatron and vLLM on CPU: one engine and one rank, each pinned to a core of its
own, so that they do not slow each other down when they work at the same time. Lengths have a long
tail: each sample gets its own ``max_tokens``, drawn from the planner's log-normal distribution, and
ends there (``rollout.ignore_eos``), whatever the schedule. A random model has no such tail of its
own.

The simulation is given these lengths and what the run of ``synchronous`` measured: the engine's
decode steps (least squares over sequences that run, tokens held and tokens read), the ranks'
seconds per token, and the rest of a step, in two parts: what comes between its samples and its
weights, beside which other schedules sample, and what nobody samples beside, such as the weight
sync. It is asked twice per schedule:

- ``error``: decode steps as this run measured them, and the ranks' seconds scaled by the CPU
  seconds that a token cost in this run and by the share of their cores' time that engine and rank
  lost while they worked (to the driver, and to whatever else runs on the machine). This is the
  error of the simulation.
- ``error_of_synchronous_costs``: what a forecast from ``synchronous`` alone would have been, but
  for the lost share. It includes how much the machine's speed changed between two runs.

Errors are of tokens per second.

The runs take turns, ``--rounds`` times. Tokens per second are those of the median run over all its
counted steps, other figures medians over steps; CPU seconds say on any machine whether a token
costs the same in each run. Prints one JSON line; takes about two minutes per round and schedule. On
a busy machine the figures mean little, as the runs are minutes apart: there, ``nice -n -10`` (root)
and several rounds. With ``--keep``, runs that the folder has already are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from child import run_python
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.simulation.lengths import Lengths, log_normal_lengths  # noqa: E402
from benchmarks.simulation.simulate import (  # noqa: E402
    Choice,
    Outcome,
    Setup,
    Times,
    simulate,
)
from rlmath.config.rollout import Overlap  # noqa: E402

PROMPTS, GROUP_SIZE = 16, 8
MEAN_TOKENS, LONGEST_TOKENS = 120, 1024
MAX_LAG = 2
ENGINE_CORE, RANK_CORE = 1, 0
REWARD = """
def odd(completions, completion_ids, **_):
    return [float(sum(ids) % 8 > 5) for ids in completion_ids]
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, and settings beside it; engine and rank have what is theirs in each."""

    choice: Choice
    settings: tuple[str, ...] = ()

    @property
    def warm_up(self) -> int:
        """Steps that fill the schedule; the simulation leaves out the same, so that both count the
        same steps, with the same problems."""
        return self.choice.overlap.max_lag + 1


def cases(lengths: Lengths) -> dict[str, Case]:
    """The cases to run."""
    continuous = Choice(Overlap(MAX_LAG, 0))
    return {
        "synchronous": Case(Choice()),
        "carry_over": Case(Choice(Overlap(MAX_LAG, lengths.quantile(0.85)))),
        "pipelined": Case(Choice(Overlap(1))),
        "continuous": Case(continuous),
        "continuous_kv_keep": Case(continuous, ("rollout.kv=keep",)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--without", nargs="*", default=[], help="cases to leave out")
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        run_one(arguments.keep, arguments.run)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        print(json.dumps(compare(folder, arguments.steps, arguments.rounds, arguments.without)))


def compare(folder: Path, steps: int, rounds: int, without: Sequence[str]) -> dict[str, Any]:
    """All runs, and all simulations."""
    from rlmath.quickstart import make_problems, make_tiny_model

    if not (folder / "reward.py").is_file():
        make_tiny_model(folder / "model")
        make_problems(folder / "data")
        (folder / "reward.py").write_text(REWARD)
    problems = len((folder / "data" / "train.jsonl").read_text().splitlines())
    lengths = log_normal_lengths(problems, GROUP_SIZE, MEAN_TOKENS, LONGEST_TOKENS)
    np.save(folder / "lengths.npy", lengths.tokens)
    chosen = {name: case for name, case in cases(lengths).items() if name not in without}
    measured: dict[str, list[Run]] = {name: [] for name in chosen}
    for index in range(rounds):
        for name, case in chosen.items():
            run_dir = folder / f"{name}_{index}"
            measured[name].append(train(folder, run_dir, case, steps))
    setup = setup_of(measured["synchronous"], lengths)
    result: dict[str, Any] = {
        "benchmark": "schedules",
        "steps": steps * rounds,
        "samples": PROMPTS * GROUP_SIZE,
        "mean_response_tokens": float(lengths.tokens.mean()),
        "times": dataclasses.asdict(setup.times),
    }
    base = tokens_per_s(measured["synchronous"])
    for name, case in chosen.items():
        runs = measured[name]
        result[name] = figures(runs, base)
        result[name]["settings"] = [*case.choice.settings, *case.settings]
        lost = lost_share(runs, measured["synchronous"])
        result[name]["lost_share"] = round(lost, 3)
        config = config_of(folder, case)
        told = dataclasses.replace(
            setup, times=own_times(setup.times, runs, measured["synchronous"])
        )
        outcome = simulate(config, told, case.choice, steps=steps)
        result[name] |= compare_with(outcome, runs)
        # A forecast from the synchronous run's costs.
        times = dataclasses.replace(setup.times, contended_share=lost)
        forecast = dataclasses.replace(setup, times=times)
        outcome = simulate(config, forecast, case.choice, steps=steps)
        result[name]["error_of_synchronous_costs"] = compare_with(outcome, runs)["error"]
    return result


@dataclasses.dataclass(frozen=True)
class Run:
    """Measurements of a run.

    Attributes:
        lines: Metrics of the counted steps.
        decoding: ``[vLLM steps, 4]`` of the whole run: seconds, sequences, tokens held, and tokens
            read of prompts and what was begun.
        prepare_s: Seconds of each counted step, between its samples and its weights, beside the
            ranks' work on tokens; only of the synchronous schedule.
        engine_busy_share: Share of the time of the counted steps.
        cpu_s: CPU seconds of engine and rank in them.
        busy_s: Seconds in which they worked, the sum of both.
    """

    lines: list[dict[str, float]]
    decoding: NDArray[np.float64]
    prepare_s: list[float]
    engine_busy_share: float
    cpu_s: tuple[float, float]
    busy_s: float


def train(folder: Path, run_dir: Path, case: Case, steps: int) -> Run:
    """A run in a separate process; one that is there is read."""
    last = case.warm_up + steps
    if not (run_dir / "summary.json").is_file():
        shutil.rmtree(run_dir, ignore_errors=True)
        # For the steps at the end less is admitted.
        given = settings(folder, run_dir, case, last + case.warm_up)
        run_python(__file__, "--keep", str(run_dir), "--run", *given)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # Seconds since 1970 at which each vLLM step began and ended, and what it had to do.
    rows = np.loadtxt(run_dir / "engine_steps.txt", ndmin=2)
    at_ends = np.loadtxt(run_dir / "step_ends.txt", ndmin=2)
    ends = at_ends[:, 0]
    began, ended = rows[:, 0], rows[:, 1]
    # Work between two steps belongs to the second one; without work there is no step.
    from_s = np.where(rows[:, 5] > 0, np.concatenate([began[:1], ended[:-1]]), began)
    began_s, ended_s = ends[case.warm_up - 1], ends[last - 1]
    within = (began > began_s) & (ended < ended_s)
    busy_s = float((ended - from_s)[within].sum())
    decoding = np.column_stack([ended - from_s, rows[:, 2:5]])[within]
    engine_cpu_s, rank_cpu_s = (at_ends[last - 1] - at_ends[case.warm_up - 1])[1:3].tolist()
    counted = lines[case.warm_up : last]
    trained_s = [line["timing/log_probs"] + line["timing/update"] for line in counted]
    prepare_s = []
    if not case.choice.overlap.max_lag:
        blocks_s = np.loadtxt(run_dir / "blocks.txt", ndmin=1)[case.warm_up : last]
        prepare_s = [float(s) - one for s, one in zip(blocks_s, trained_s, strict=True)]
    return Run(
        counted,
        decoding,
        prepare_s,
        engine_busy_share=busy_s / float(ended_s - began_s),
        cpu_s=(engine_cpu_s, rank_cpu_s),
        busy_s=busy_s + sum(trained_s),
    )


def settings(folder: Path, run_dir: Path, case: Case, steps: int) -> list[str]:
    return [
        "experiment=quickstart",
        f"model.path={folder / 'model'}",
        f"data.train_paths=[{folder / 'data' / 'train.jsonl'}]",
        "data.eval_paths=[]",
        # The problems in the order in which the simulation has them.
        "data.shuffle=false",
        f"reward.items=[{{name: '{folder / 'reward.py'}:odd'}}]",
        f"runner.run_dir={run_dir}",
        f"runner.steps={steps}",
        "runner.check_export_sequences=0",
        f"algorithm.prompts_per_step={PROMPTS}",
        f"algorithm.group_size={GROUP_SIZE}",
        "algorithm.minibatches_per_step=1",
        # All of them do what those that train on old tokens have to.
        "algorithm.correction.kind=token_truncate",
        f"rollout.max_response_tokens={LONGEST_TOKENS}",
        "rollout.ignore_eos=true",
        "rollout.cpu_kv_cache_gib=1",
        "actor.tensor_parallel=1",
        "actor.max_tokens_per_microbatch=4096",
        # Asks the engines for more samples where a step has none of the newest weights.
        "alignment.every=0",
        "eval.every=0",
        *case.choice.settings,
        *case.settings,
    ]


def config_of(folder: Path, case: Case) -> Any:
    """Settings of the simulation beside the choice."""
    from rlmath.config.load import load

    return load(settings(folder, folder / "simulated", case, 1))


def setup_of(runs: Sequence[Run], lengths: Lengths) -> Setup:
    """Inputs of the simulation, from runs of the synchronous schedule alone."""
    lines = [line for run in runs for line in run.lines]
    trained_s = [line["timing/log_probs"] + line["timing/update"] for line in lines]
    prepare_s = [seconds for run in runs for seconds in run.prepare_s]
    # Work on the samples before anything is sampled ahead, the weight sync, the log.
    fixed_s = [
        line["timing/step"] - line["timing/generate"] - line.get("timing/grade", 0.0) - one - more
        for line, one, more in zip(lines, trained_s, prepare_s, strict=True)
    ]
    tokens = [line["rollout/tokens"] for line in lines]
    responses = statistics.fmean(line["rollout/response_tokens"] for line in lines)
    prompt_tokens = (statistics.fmean(tokens) - responses) / (PROMPTS * GROUP_SIZE)
    times = Times(
        **decode_times(runs),
        train_token_s=sum(trained_s) / sum(tokens),
        fixed_s=statistics.fmean(fixed_s),
        prepare_s=statistics.fmean(prepare_s),
    )
    return Setup(1, 256, round(prompt_tokens), lengths, times)


def own_times(times: Times, runs: Sequence[Run], synchronous: Sequence[Run]) -> Times:
    """``times`` with what the same work cost in these runs, minutes later on the same machine."""

    def rank_cpu_s_per_token(some: Sequence[Run]) -> float:
        return sum(run.cpu_s[1] for run in some) / response_tokens(some)

    slowdown = rank_cpu_s_per_token(runs) / rank_cpu_s_per_token(synchronous)
    return dataclasses.replace(
        times,
        **decode_times(runs),
        train_token_s=times.train_token_s * slowdown / (1 - lost_share(runs, synchronous)),
        prepare_s=times.prepare_s * slowdown,
        fixed_s=times.fixed_s * slowdown,
    )


def decode_times(runs: Sequence[Run]) -> dict[str, float]:
    """Coefficients of an engine step's seconds, by field of ``Times``."""
    rows = np.concatenate([run.decoding for run in runs])
    inputs = np.column_stack([np.ones(len(rows)), rows[:, 1:]])
    names = ("step_s", "sequence_s", "token_s", "prefill_token_s")
    return dict(zip(names, non_negative_fit(inputs, rows[:, 0]), strict=True))


def lost_share(runs: Sequence[Run], synchronous: Sequence[Run]) -> float:
    """Share of the time in which engine and rank worked that they lost to each other, against runs
    in which they take turns."""

    def got(some: Sequence[Run]) -> float:
        return sum(sum(run.cpu_s) for run in some) / sum(run.busy_s for run in some)

    return max(0.0, 1 - got(runs) / got(synchronous))


def non_negative_fit(inputs: NDArray[np.float64], wanted: NDArray[np.float64]) -> list[float]:
    """Least squares without negative coefficients: what would be negative is left out."""
    kept = list(range(inputs.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(inputs[:, kept], wanted, rcond=None)
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    given = dict(zip(kept, found.tolist(), strict=True))
    return [given.get(index, 0.0) for index in range(inputs.shape[1])]


def tokens_per_s(runs: Sequence[Run]) -> float:
    """Response tokens trained on per second, over the counted steps of a run; the median run's."""
    return statistics.median(
        sum(line["rollout/response_tokens"] for line in run.lines)
        / sum(line["timing/step"] for line in run.lines)
        for run in runs
    )


def response_tokens(runs: Sequence[Run]) -> float:
    return sum(line["rollout/response_tokens"] for run in runs for line in run.lines)


def figures(runs: Sequence[Run], base: float) -> dict[str, Any]:
    """Measurements of the runs."""
    lines = [line for run in runs for line in run.lines]
    steps_s = [line["timing/step"] for line in lines]
    found = tokens_per_s(runs)
    waited = [
        (line["timing/generate"] + line.get("timing/grade", 0.0)) / line["timing/step"]
        for line in lines
    ]
    tokens = response_tokens(runs)
    engine_cpu_s, rank_cpu_s = (sum(run.cpu_s[i] for run in runs) for i in (0, 1))
    return {
        "settings": [],
        "step_s": round(statistics.median(steps_s), 3),
        "step_s_range": [round(min(steps_s), 3), round(max(steps_s), 3)],
        "step_s_of_rounds": [
            round(statistics.median(line["timing/step"] for line in run.lines), 3) for run in runs
        ],
        "tokens_per_s": round(found),
        "to_synchronous": round(found / base, 3),
        "engine_cpu_us_per_token": round(1e6 * engine_cpu_s / tokens, 1),
        "rank_cpu_us_per_token": round(1e6 * rank_cpu_s / tokens, 1),
        "engine_idle_share": round(1 - statistics.fmean(r.engine_busy_share for r in runs), 3),
        "actor_idle_share": round(statistics.median(waited), 3),
        "lag_mean": round(statistics.fmean(line.get("rollout/lag_mean", 0.0) for line in lines), 3),
    }


def compare_with(outcome: Outcome, runs: Sequence[Run]) -> dict[str, float]:
    """Predictions of the simulation for the runs."""
    return {
        "simulated_step_s": round(outcome.step_s, 3),
        "simulated_tokens_per_s": round(outcome.tokens_per_s),
        "simulated_actor_idle_share": round(outcome.actor_idle_share, 3),
        "simulated_lag_mean": round(outcome.lag_mean, 3),
        "error": round(outcome.tokens_per_s / tokens_per_s(runs) - 1, 4),
    }


# From here on: in the process of a run.


def run_one(run_dir: Path, overrides: list[str]) -> None:
    """``rlmath train`` with the lengths of the benchmark, its processes pinned and its engine's
    steps timed."""
    from rlmath.cli import main as rlmath
    from rlmath.monitor import Monitor
    from rlmath.rollout import sampler
    from rlmath.rollout.pool import RolloutPool
    from rlmath.training.group_source import GroupSource

    run_dir.mkdir(parents=True)
    tokens = np.load(run_dir.parent / "lengths.npy")
    requests_for, ready = sampler.requests_for, RolloutPool.wait_until_ready
    log_step = Monitor.log_step

    def with_lengths(*arguments: Any, **given: Any) -> Any:
        return [
            dataclasses.replace(one, max_tokens=int(tokens[line_of(one.problem_id), one.index]))
            for one in requests_for(*arguments, **given)
        ]

    def wait_and_time(pool: RolloutPool) -> None:
        ready(pool)
        path = str(run_dir / "engine_steps.txt")
        pool.call_engines(lambda engine: time_steps(engine, path))

    pinning = threading.Thread(target=keep_pinned, daemon=True)

    def note(monitor: Monitor, step: int, metrics: Any) -> Any:
        with (run_dir / "step_ends.txt").open("a") as file:
            file.write(f"{time.time()} {' '.join(map(str, cpu_seconds()))}\n")
        if step == 1:
            pinning.start()  # After the first step, in which much is loaded and compiled.
        return log_step(monitor, step, metrics)

    take, changed = GroupSource.take, GroupSource.weights_changed
    taken_s = 0.0

    def noted_take(source: GroupSource, step: int) -> Any:
        nonlocal taken_s
        found = take(source, step)
        taken_s = time.monotonic()
        return found

    def timed_block(source: GroupSource, step: int) -> None:
        """From the take on, in which other schedules sample, and this one does not."""
        changed(source, step)
        with (run_dir / "blocks.txt").open("a") as file:
            file.write(f"{time.monotonic() - taken_s}\n")

    GroupSource.take = noted_take  # type: ignore[method-assign]
    GroupSource.weights_changed = timed_block  # type: ignore[method-assign]
    sampler.requests_for = with_lengths
    RolloutPool.wait_until_ready = wait_and_time  # type: ignore[method-assign]
    Monitor.log_step = note  # type: ignore[method-assign]
    raise SystemExit(rlmath(["train", *overrides]))


def line_of(problem_id: str) -> int:
    """``train.jsonl:5`` is the line at place 4, or 5: as the data counts."""
    from rlmath.monitor.samples import data_id

    return int(data_id(problem_id).rpartition(":")[2]) - FIRST_LINE


# The number of a file's first line in problem ids.
FIRST_LINE = 1


def time_steps(engine: Any, path: str) -> None:
    """In the engine's process: write down when each vLLM step began and ended, its sequences, the
    tokens that they held, those that it read, and whether the engine had work before it."""
    import time

    client = engine.engine_core
    scheduler = client.engine_core.scheduler
    get_output = client.get_output
    rows: list[str] = []
    had_work = False

    def waiting() -> int:
        return sum(request.num_tokens for request in scheduler.waiting)

    def get_and_time() -> Any:
        nonlocal had_work
        began_s, before = time.time(), waiting()
        held = sum(request.num_computed_tokens for request in scheduler.running)
        outputs = get_output()
        count = len(outputs.outputs)
        row = (began_s, time.time(), count, held, before - waiting(), int(had_work))
        rows.append(" ".join(str(value) for value in row))
        had_work = bool(scheduler.running)
        if len(rows) >= 100 or not had_work:
            with open(path, "a") as file:
                file.write("".join(f"{row}\n" for row in rows))
            rows.clear()
        return outputs

    client.get_output = get_and_time


def cpu_seconds() -> tuple[float, float, float, float]:
    """CPU seconds of the engine, the rank, the rest of the run, and all programs, so far."""
    import psutil

    found = dict.fromkeys((*CORES, ""), 0.0)
    machine = psutil.cpu_times()
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        found[next((name for name in CORES if name in title), "")] += times.user + times.system
    engine, rank, others = found.values()
    return engine, rank, others, busy


def keep_pinned() -> None:
    """Pin the engine and the rank to their cores, threads that start later too."""
    import psutil

    while True:
        for process in psutil.Process().children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                core = next((core for name, core in CORES.items() if name in title), None)
                for thread in process.threads() if core is not None else ():
                    os.sched_setaffinity(thread.id, {core})
            except (psutil.Error, OSError):
                continue
        time.sleep(1.0)


# Names in the titles that Ray gives its processes.
CORES = {"RolloutEngine": ENGINE_CORE, "ActorWorker": RANK_CORE}


if __name__ == "__main__":
    main()
