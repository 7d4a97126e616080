"""``rlmath evaluate``: sample and grade benchmarks with a model, and keep every response."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from rlmath.checkpoint import naming_full_disk
from rlmath.checks.prompt_style import with_prompt_style
from rlmath.config.load import save
from rlmath.config.schema import Config
from rlmath.data import load_tokenizer
from rlmath.evaluation.held_out import HeldOut, load_held_out
from rlmath.evaluation.journal import Journal
from rlmath.evaluation.metrics import benchmark_metrics, tag_metrics
from rlmath.evaluation.results import (
    PLOT_FILE,
    RESULTS_FILE,
    TABLE_FILE,
    read_results,
    table,
    write_results,
)
from rlmath.evaluation.run import sample_and_grade, sample_kind
from rlmath.evaluation.source import about, with_checkpoint
from rlmath.monitor import Monitor, open_monitor
from rlmath.monitor.samples import write_samples
from rlmath.rollout.progress import sampling_progress
from rlmath.rollout.sampling import Sampling
from rlmath.training.opening import open_engines, with_model_folder
from rlmath.utils.run_lock import only_run_in


def run(config: Config, name: str = "evaluation") -> int:
    """Evaluate ``model.path``, or ``eval.checkpoint``, and keep every response.

    Writes to ``run_dir/evaluation``, apart from what a training run has there. What an earlier
    call has finished of the same evaluation is taken over, unless ``runner.resume=never``.
    """
    folder = Path(config.runner.run_dir) / name
    with only_run_in(folder), naming_full_disk(folder, lambda: "Finished samples are kept."):
        return _evaluate_all(config, folder)


def _evaluate_all(config: Config, folder: Path) -> int:
    config = with_prompt_style(with_model_folder(config), "evaluate")
    evaluated = config.eval.checkpoint or config.model.path
    config = with_checkpoint(config, folder / "model")
    save(config, folder / "config.yaml")
    held_out = load_held_out(config, load_tokenizer(config.model.path))
    entries = _finished_entries(config, folder, held_out)
    for one in held_out:
        if one.benchmark.name in entries:
            print(
                f"{one.benchmark.title}: the same weights, problems, settings and rewards were "
                "evaluated before, and the results are those; runner.resume=never evaluates again",
                flush=True,
            )
    left = [one for one in held_out if one.benchmark.name not in entries]
    if left:
        with (
            open_engines(config, [p for one in left for p in one.problems]) as sampling,
            # A monitor begins its folder again; the samples of earlier calls are beside it.
            open_monitor(
                folder / "log",
                config.runner,
                total_steps=0,
                sampling=functools.partial(sampling_progress, sampling.pool),
            ) as monitor,
        ):
            for one in left:
                entries[one.benchmark.name] = _evaluate_one(config, sampling, one, monitor, folder)
                order = [h.benchmark.name for h in held_out if h.benchmark.name in entries]
                write_results(folder, evaluated, {name: entries[name] for name in order})
                _journal_path(folder, one.benchmark.name).unlink()
            by_name = {h.benchmark.name: entries[h.benchmark.name]["metrics"] for h in held_out}
            monitor.log_step(0, tag_metrics(by_name))
    print(table(entries))
    print(f"written to {folder}: {RESULTS_FILE}, {TABLE_FILE}, {PLOT_FILE}; responses in samples/")
    return 0


def _evaluate_one(
    config: Config, sampling: Sampling, held_out: HeldOut, monitor: Monitor, folder: Path
) -> dict[str, Any]:
    """Evaluate one benchmark and return its entry in the results."""
    benchmark = held_out.benchmark
    fingerprint = about(config, held_out)
    with Journal(_journal_path(folder, benchmark.name), fingerprint) as journal:
        if config.runner.resume == "never":
            journal.samples.clear()
        elif journal.samples:
            print(f"{benchmark.name}: {len(journal.samples)} samples are there from before")
        started_s, before = time.monotonic(), len(journal.samples)
        with monitor.phase("evaluate"):
            groups = sample_and_grade(sampling, config.runner.seed, held_out, 0, journal)
        seconds = time.monotonic() - started_s
        write_samples(folder, 0, groups, kind=sample_kind(benchmark.name))
    return {
        "problems": len(groups),
        "settings": fingerprint["settings"],
        "metrics": benchmark_metrics(groups),
        "samples_made": sum(len(group.samples) for group in groups) - before,
        "seconds": seconds,
        "about": fingerprint,
    }


def _journal_path(folder: Path, benchmark: str) -> Path:
    return folder / "unfinished" / f"{benchmark}.jsonl"


def _finished_entries(config: Config, folder: Path, held_out: list[HeldOut]) -> dict[str, Any]:
    """Entries of an earlier call with the same settings."""
    if config.runner.resume == "never":
        return {}
    earlier = read_results(folder)
    return {
        one.benchmark.name: earlier[one.benchmark.name]
        for one in held_out
        if one.benchmark.name in earlier
        and earlier[one.benchmark.name]["about"] == about(config, one)
    }
