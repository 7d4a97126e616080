"""Checks of evaluation: names, sampling, and the metric of the best checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rlmath.config.benchmarks import (
    BENCHMARKS,
    HELD_OUT,
    PUBLISHED,
    Benchmark,
    benchmarks_of,
    find_published,
)
from rlmath.config.schema import Config
from rlmath.plugins.source import split
from rlmath.utils.close_names import did_you_mean

# A name is part of tags and of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")


def benchmark_problems(config: Config, command: str) -> Iterator[str]:
    if command == "sft":
        return
    names: set[str] = {HELD_OUT}
    for index, item in enumerate(config.eval.benchmarks):
        key = f"eval.benchmarks[{index}]"
        if item.path is None and split(item.name)[1]:
            yield from BENCHMARKS.problems(item.name)
        elif not _NAME.fullmatch(item.name):
            yield (
                f"{key}.name={item.name!r}: a name is of letters, digits, _, - and ., because it "
                "is part of tags and file names"
            )
        elif item.name in names:
            what = "the problems of data.eval_paths" if item.name == HELD_OUT else "another"
            yield f"{key}.name={item.name}: is that of {what}; each needs its own name"
        elif item.path is None and find_published(item.name) is None:
            known = [*PUBLISHED, *BENCHMARKS.names()]
            hint = did_you_mean(item.name, known)
            yield (
                f"{key}.name={item.name}: known are {', '.join(known)}{hint}; one of your own "
                "needs its path"
            )
        names.add(item.name)
    if config.eval.temperature == 0 and config.eval.samples > 1:
        yield _one_greedy("eval", config.eval.samples)
    for benchmark in benchmarks_of(config):
        if benchmark.name == HELD_OUT:
            continue
        if benchmark.temperature == 0 and benchmark.samples > 1:
            yield _one_greedy(benchmark.key, benchmark.samples)
    if config.eval.checkpoint is not None and command == "train":
        yield (
            f"eval.checkpoint={config.eval.checkpoint}: is for rlmath evaluate; a training run "
            "evaluates its own weights (runner.resume continues from a checkpoint)"
        )
    if config.eval.checkpoint is not None and not Path(config.eval.checkpoint).is_dir():
        yield (
            f"eval.checkpoint={config.eval.checkpoint}: no such folder; give one such as "
            "runs/mine/checkpoints/step_000050"
        )
    if command == "train":
        yield from _best_metric(config)


def _one_greedy(key: str, samples: int) -> str:
    return (
        f"{key}.samples={samples}: with {key}.temperature=0 all samples of a problem are the same; "
        "use 1 sample, or a temperature above 0"
    )


def data_of(config: Config, benchmark: Benchmark) -> str:
    """How to fix a missing file of a known benchmark."""
    known = PUBLISHED.get(benchmark.name)
    if known is None or benchmark.paths != (str(Path(config.eval.data_dir) / known.file),):
        return ""
    return (
        f"; fetch it with toolkits/prepare_data.py {benchmark.name} --to {config.eval.data_dir}, "
        "or say where it is with path or eval.data_dir"
    )


def _best_metric(config: Config) -> Iterator[str]:
    metric, runner = config.runner.best_metric, config.runner
    if metric is None:
        return
    if not metric.startswith("eval/"):
        return
    key = f"runner.best_metric={metric}"
    if not benchmarks_of(config) or not config.eval.every:
        yield f"{key}: nothing is evaluated; set data.eval_paths or eval.benchmarks, and eval.every"
    elif runner.save_every and runner.save_every % config.eval.every:
        yield (
            f"{key}: checkpoints are saved every {runner.save_every} steps, but evaluation every "
            f"{config.eval.every} steps has not all of these; make runner.save_every a multiple "
            "of eval.every"
        )
    name = metric.split("/")[1]
    names = [benchmark.name for benchmark in benchmarks_of(config)]
    if metric.count("/") == 2 and name not in names:
        yield f"{key}: no benchmark is called {name}; there are {', '.join(names) or 'none'}"
