"""``rlmath sample``: sample problems, and keep the right answers as worked examples for SFT.

An evaluation of the problems (:mod:`rlmath.commands.evaluate`), whose graded samples are then
filtered: rejection sampling. It resumes as an evaluation does.
"""

from __future__ import annotations

import argparse
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.checks import overview, start
from rlmath.checks.machine import Machine
from rlmath.checks.prompt_style import with_prompt_style
from rlmath.checks.run import find_problems
from rlmath.config import load
from rlmath.config.command_line import count
from rlmath.config.hub_names import is_hub
from rlmath.config.quoting import override, quoted_path
from rlmath.config.schema import Config
from rlmath.config.settings import replace_values
from rlmath.data.fields import field_of
from rlmath.data.files import MalformedRowError, read_rows
from rlmath.errors import ConfigError, UserError
from rlmath.model.hub import is_hub_model
from rlmath.monitor.json_lines import write_lines
from rlmath.monitor.samples import FOLDER, read_samples
from rlmath.rewards.registry import any_graded
from rlmath.weights.model_folder import replaced_source

# Folder in the run's folder, separate from training and evaluations.
SAMPLE_FOLDER = "sample"
KEPT_FILE = "correct.jsonl"
# Settings that decide how a row becomes a prompt, which `rlmath sft` would decide from its file.
_STYLE = ("apply_chat_template", "prompt_template", "system_prompt", "template_date")
# Statuses of graded answers; a failed grader and a bad gold have other ones.
_GRADED = ("correct", "wrong", "no_answer")
# Outcomes of a sample, in the order in which they are decided.
_OUTCOMES = ("truncated", "ungraded", "wrong", "duplicate", "capped", "kept")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="problems, read with data.prompt_key and data.answer_key")
    parser.add_argument(
        "--keep", choices=["correct"], required=True, help="correct: answers graded as correct"
    )
    parser.add_argument(
        "--keep-per-problem",
        type=count,
        default=4,
        metavar="N",
        help="most answers to keep of a problem, those sampled first (default 4)",
    )
    parser.add_argument("--sft", action="store_true", help="then run rlmath sft on the kept ones")
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your own config groups")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for rlmath evaluate")


def run(options: argparse.Namespace) -> int:
    """Sample, filter and write ``run_dir/sample/correct.jsonl``. Returns the exit code. Raises
    UserError: the settings cannot work, or no answer is known to be correct."""
    given = load.load(_overrides(options), options.config_dir)
    folder = Path(given.runner.run_dir) / SAMPLE_FOLDER
    if problems := list(_problems(given, options, folder)):
        raise ConfigError.of(problems)
    ready = start.ready(given, "evaluate")
    print(overview.describe_evaluation(ready.config), flush=True)
    ready.report()
    target = folder / KEPT_FILE
    target.unlink(missing_ok=True)  # It may be of other settings.

    from rlmath.commands import evaluate

    evaluate.run(ready.config, SAMPLE_FOLDER)
    kept = _read_kept(ready.config, options, folder / FOLDER)
    print(kept.describe(), flush=True)
    if not kept.counts["kept"]:
        raise UserError(
            f"{options.file}: none of {len(kept):,} answers was kept, so no file is written; their "
            f"grades are in {folder / FOLDER}. Take more samples (eval.samples), longer ones "
            "(eval.max_response_tokens), or easier problems"
        )
    write_lines(target, kept.rows)
    fine_tuning = _for_sft(ready.config, target)
    print(f"worked examples: {target}\n{_next_command(options, fine_tuning)}", flush=True)
    if not options.sft:
        return 0
    found = start.ready(fine_tuning, "sft")
    found.report()
    if found.is_finished:
        return 0
    from rlmath.training import sft

    return sft.run(found.config)


def _overrides(options: argparse.Namespace) -> list[str]:
    """The settings on the command line, with the file as the only problems to evaluate."""
    keys = {word.partition("=")[0] for word in options.settings}
    if chosen := keys & {"data.eval_paths", "eval.benchmarks"}:
        raise UserError(f"{min(chosen)}: rlmath sample reads the problems of {options.file} alone")
    # A limit in an experiment is for its held-out problems.
    limit = [] if "data.max_eval_problems" in keys else ["data.max_eval_problems=null"]
    problems = [f"data.eval_paths=[{quoted_path(options.file)}]", "eval.benchmarks=[]"]
    return [*options.settings, *limit, *problems]


def _problems(config: Config, options: argparse.Namespace, folder: Path) -> Iterable[str]:
    """Messages for settings with which no answers could be kept, or no model trained on them."""
    if not any_graded(item.name for item in config.reward.items):
        yield (
            "reward.items: none of them compares an answer with the accepted one, so that none is "
            "known to be correct; add {name: math}"
        )
    if config.data.prompt_key == config.sft.response_key:
        yield (
            f"sft.response_key={config.sft.response_key}: is data.prompt_key as well; worked "
            "examples need a field for each"
        )
    if not is_hub(options.file) and replaced_source(folder, [Path(options.file)]):
        yield f"{options.file}: is in {folder}, which is written; give another runner.run_dir"
    if options.sft and not is_hub_model(config.model.path):
        target = folder / KEPT_FILE
        for problem in find_problems(_for_sft(config, target), "sft", Machine.here()):
            if not problem.startswith("sft.train_paths"):  # It is still to be written.
                yield f"--sft: {problem}"


def _for_sft(config: Config, examples: Path) -> Config:
    """The settings of fine-tuning: the prompts are those that were sampled."""
    return replace_values(
        with_prompt_style(config, "evaluate"),
        {"sft.train_paths": [str(examples)], "data.eval_paths": [], "eval.checkpoint": None},
    )


def _next_command(options: argparse.Namespace, config: Config) -> str:
    words = ["rlmath", "sft", *options.settings]
    if options.config_dir:
        words += ["--config-dir", options.config_dir]
    given = {word.partition("=")[0] for word in options.settings}
    for name in _STYLE:
        value = getattr(config.data, name)
        if value is not None and f"data.{name}" not in given:
            words.append(override(f"data.{name}", value))
    words.append(f"sft.train_paths=[{quoted_path(config.sft.train_paths[0])}]")
    return f"train on them: {shlex.join(words)}"


@dataclass(frozen=True)
class Kept:
    """Worked examples, and the outcomes of all samples."""

    rows: list[dict[str, Any]]
    counts: Mapping[str, int]
    problems: int
    graded: int
    correct: int

    def __len__(self) -> int:
        return sum(self.counts.values())

    def describe(self) -> str:
        rate = f"{100 * self.correct / self.graded:.1f} %" if self.graded else "unknown"
        counts = ", ".join(f"{self.counts[name]:,} {name}" for name in reversed(_OUTCOMES))
        return (
            f"pass rate {rate} of {self.graded:,} graded answers; {len(self):,} answers: {counts}; "
            f"{self.problems:,} problems have a kept answer"
        )


def _read_kept(config: Config, options: argparse.Namespace, samples: Path) -> Kept:
    found = sorted(samples.glob("eval_000000.jsonl*"))
    if not found:
        raise UserError(f"{samples}: its files are gone; sample again with runner.resume=never")
    rows = read_rows([options.file])
    fields = {
        row.place: row.fields for row in rows if not isinstance(row.fields, MalformedRowError)
    }
    return keep_correct(
        read_samples(found[0]),
        fields,
        per_problem=options.keep_per_problem,
        prompt_key=config.data.prompt_key,
        response_key=config.sft.response_key,
    )


def keep_correct(
    samples: Iterable[Mapping[str, Any]],
    fields: Mapping[str, Mapping[str, Any]],
    *,
    per_problem: int,
    prompt_key: str,
    response_key: str,
) -> Kept:
    """Choose the samples to train on.

    A truncated answer is never kept, nor one whose grade failed. Of answers to the same prompt that
    differ in white space alone the first is kept, and of the others the first ``per_problem``; rows
    that repeat a prompt are one problem.
    """
    rows, counts = [], Counter[str]()
    texts: dict[str, set[str]] = defaultdict(set)
    kept: Counter[str] = Counter()
    graded = correct = 0
    for sample in samples:
        prompt, text = sample["prompt"], " ".join(sample["response"].split())
        is_graded = sample["status"] in _GRADED
        graded += is_graded
        correct += is_graded and sample["correct"]
        if sample["finish_reason"] != "stop":
            outcome = "truncated"
        elif not is_graded:
            outcome = "ungraded"
        elif not sample["correct"] or not text:
            outcome = "wrong"
        elif text in texts[prompt]:
            outcome = "duplicate"
        elif kept[prompt] == per_problem:
            outcome = "capped"
        else:
            outcome = "kept"
            texts[prompt].add(text)
            kept[prompt] += 1
            about = {name: sample[name] for name in ("problem_id", "index", "answer")}
            value = field_of(fields[sample["problem_id"]], prompt_key)
            rows.append(about | {prompt_key: value, response_key: sample["response"]})
        counts[outcome] += 1
    return Kept(rows, counts, len(kept), graded, correct)
