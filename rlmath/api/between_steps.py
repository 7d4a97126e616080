"""Saving, evaluating and sampling a run between two of its steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.checks.benchmarks import benchmark_problems
from rlmath.config.eval import BenchmarkItem
from rlmath.config.options import complete
from rlmath.config.schema import Config
from rlmath.config.settings import replace_values
from rlmath.data import load_tokenizer
from rlmath.data.prompts import Encoder, PromptRenderer
from rlmath.errors import ConfigError, UserError
from rlmath.evaluation.held_out import HeldOut, load_held_out
from rlmath.evaluation.metrics import benchmark_metrics
from rlmath.evaluation.results import read_results, write_results
from rlmath.evaluation.run import SEED_OFFSET, sample_and_grade, sample_kind
from rlmath.monitor.samples import write_samples
from rlmath.rollout.seeds import requests_for
from rlmath.rollout.weight_sync import sync_weights
from rlmath.training.attempt import Training
from rlmath.training.model_card import HF_ADAPTER
from rlmath.training.summary import check_export
from rlmath.types import Problem


def save(training: Training, folder: Path) -> None:
    """See :meth:`rlmath.Run.save`."""
    run = training.parts.run
    run.sampling.pool.sleep()  # A GPU has no room for both.
    has_adapters = training.config.actor.lora.rank
    run.actor.save_hf(folder, folder / HF_ADAPTER if has_adapters else None)
    check_export(run, folder, None)
    wake(training)


def wake(training: Training) -> None:
    """Wake sleeping engines and sync their weights."""
    run = training.parts.run
    pool = run.sampling.pool
    if pool.spec.sleeps:
        pool.sleep()
        sync_weights(run.actor, pool, pool.weights_version, again=True)


def with_benchmark(config: Config, name: str | None, settings: Mapping[str, Any]) -> Config:
    """The settings with one benchmark alone to evaluate.

    Raises:
        ConfigError: It is not known, or has no such setting.
    """
    if name is None:
        if not config.data.eval_paths:
            raise ConfigError("evaluate: name a benchmark, as data.eval_paths has no problems")
        return replace_values(config, {"eval.benchmarks": []})
    try:
        item = BenchmarkItem(name=name, **settings)
    except TypeError as error:
        names = ", ".join(one.name for one in dataclasses.fields(BenchmarkItem))
        raise ConfigError(f"evaluate: {error}; a benchmark has {names}") from error
    config = replace_values(config, {"eval.benchmarks": [item], "data.eval_paths": []})
    complete(config)
    if problems := list(benchmark_problems(config, "evaluate")):
        raise ConfigError.of(problems)
    return config


def evaluate(training: Training, config: Config, step: int) -> Mapping[str, float]:
    """See :meth:`rlmath.Run.evaluate`."""
    began_s = time.monotonic()
    (found,) = _within_room(training, config)
    with training.monitor.phase("evaluate"):
        groups = sample_and_grade(training.parts.run.sampling, config.runner.seed, found, step)
    folder = Path(config.runner.run_dir) / "evaluation" / f"step_{step:06d}"
    name = found.benchmark.name
    write_samples(folder, step, groups, kind=sample_kind(name))
    metrics = benchmark_metrics(groups)
    settings = dataclasses.asdict(found.benchmark)
    entry = {
        "problems": len(groups),
        "settings": {key: settings[key] for key in ("samples", "temperature", "top_p")}
        | {"max_response_tokens": found.benchmark.max_response_tokens},
        "metrics": metrics,
        "samples_made": sum(len(group.samples) for group in groups),
        "seconds": time.monotonic() - began_s,
    }
    write_results(
        folder, f"{config.runner.run_dir}, step {step}", read_results(folder) | {name: entry}
    )
    return metrics


def _within_room(training: Training, config: Config) -> list[HeldOut]:
    """The benchmark, with response limits that fit the engines beside its longest prompt."""
    room = training.parts.run.sampling.pool.spec.max_sequence_tokens
    styled = replace_values(config, {"data.max_prompt_tokens": room - 1})
    found = []
    for one in load_held_out(styled, load_tokenizer(config.model.path)):
        longest = max(len(problem.prompt_token_ids) for problem in one.problems)
        wanted, most = one.benchmark.max_response_tokens, room - longest
        if wanted > most:
            print(
                f"evaluate {one.benchmark.title}: responses have up to {most:,} tokens instead of "
                f"{wanted:,}: this run's engines have room for {room:,}, and the longest prompt "
                f"has {longest:,}. eval.benchmarks in the settings gives them more",
                flush=True,
            )
        limited = dataclasses.replace(one.benchmark, max_response_tokens=min(wanted, most))
        found.append(HeldOut(limited, one.problems))
    return found


@dataclass(frozen=True)
class Sampling:
    """The arguments of :meth:`rlmath.Run.sample`, and the step."""

    prompts: tuple[str, ...]
    samples: int
    temperature: float | None
    max_tokens: int | None
    step: int


def sample(training: Training, wanted: Sampling) -> list[list[str]]:
    """See :meth:`rlmath.Run.sample`."""
    config, pool = training.config, training.parts.run.sampling.pool
    data, rollout = config.data, config.rollout
    tokenizer = load_tokenizer(config.model.path)
    renderer = PromptRenderer(data, tokenizer)
    texts = [renderer.render(prompt, {}) for prompt in wanted.prompts]
    ids = Encoder(tokenizer).encode(texts, not data.apply_chat_template)
    most = rollout.max_response_tokens if wanted.max_tokens is None else wanted.max_tokens
    room = pool.spec.max_sequence_tokens
    for index, tokens in enumerate(ids):
        if len(tokens) + most > room:
            raise UserError(
                f"sample: prompt {index} has {len(tokens):,} tokens, and {len(tokens):,} + "
                f"max_tokens={most:,} are more than the {room:,} that this run's engines have room "
                f"for; give max_tokens of up to {room - len(tokens):,}"
            )
    problems = [
        Problem(f"sample:{index}", text, tokens, ())
        for index, (text, tokens) in enumerate(zip(texts, ids, strict=True))
    ]
    requests = requests_for(
        problems,
        samples=wanted.samples,
        max_tokens=most,
        temperature=rollout.temperature if wanted.temperature is None else wanted.temperature,
        run_seed=config.runner.seed + SEED_OFFSET,
        step=wanted.step,
    )
    found: dict[str, dict[int, str]] = {problem.id: {} for problem in problems}
    for one in pool.generate(requests):
        found[one.problem_id][one.index] = one.text
    return [[text for _, text in sorted(texts.items())] for texts in found.values()]
