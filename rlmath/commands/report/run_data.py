"""A run as the page takes it: figures, events, problems and samples, each within its limit."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.commands.report import math_text
from rlmath.commands.report.answers import answers
from rlmath.commands.report.events import MAX_EVENTS, events_of
from rlmath.commands.report.sample_sets import Samples, heat_map
from rlmath.commands.report.tokens import token_table, tokenizer_of
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.monitor.run_folder import TRAINING, RunFolder
from rlmath.monitor.writer import NOT_FINITE, STEP, TIME

# Bytes of a page for texts of samples, formulas, and values by token. With the curves a page stays
# below 20 MB.
SAMPLES_BYTES = 8_000_000
FORMULAS_BYTES = 3_500_000
TOKENS_BYTES = 3_000_000
_ROW = ("answer", "accepted", "status", "method", "reward", "rewards", "dropped")
MAX_STEPS = 1200  # points of a curve
# Names and settings that say what was trained.
FACTS = (
    ("model", "model.path"),
    ("training data", "data.train_paths"),
    ("held-out data", "data.eval_paths"),
    ("schedule", "rollout.schedule"),
    ("oldest group, steps", "rollout.max_lag"),
    ("tokens before a cut", "rollout.cut_after_tokens"),
    ("advantage", "algorithm.advantage"),
    ("loss", "algorithm.loss"),
    ("problems per step", "algorithm.prompts_per_step"),
    ("samples per problem", "algorithm.group_size"),
    ("longest response, tokens", "rollout.max_response_tokens"),
    ("learning rate", "actor.optimizer.lr"),
    ("seed", "runner.seed"),
)
# Settings of an SFT in their place.
_SFT_FACTS = {
    "model.path": "model.path",
    "data.train_paths": "sft.train_paths",
    "actor.optimizer.lr": "sft.optimizer.lr",
}


def run_data(run: RunFolder, samples: Samples, share: float = 1.0) -> dict[str, Any]:
    """All that the page shows of a run, as JSON values; ``share``: of the page's limits."""
    events = events_of(run)
    notes: list[str] = []
    steps, metrics = _curves(run.metrics, notes)
    axes = _axes(run.metrics)
    keys = [_SFT_FACTS.get(key) if run.is_sft else key for _, key in FACTS]
    data = {
        "name": run.name,
        "answers": [dataclasses.astuple(one) for one in answers(run, events)],
        "facts": [_text(run.settings.get(key or "")) for key in keys],
        "steps": steps,
        "axes": {name: [found[step] for step in steps] for name, found in axes.items()},
        "metrics": metrics,
        "events": [[event.step, event.kind, event.text] for event in events[:MAX_EVENTS]],
        "settings": dict(run.settings),
        "kinds": _kinds(samples),
        **_samples(samples, int(FORMULAS_BYTES * share), tokenizer_of(run), notes),
    }
    notes += [] if run.is_sft else _omissions(run, samples, len(events))
    return data | {"notes": notes}


def _text(value: Any) -> str | None:
    return (
        None
        if value is None
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


def _curves(
    lines: Sequence[Mapping[str, Any]], notes: list[str]
) -> tuple[list[int], dict[str, list[float | None]]]:
    every = math.ceil(len(lines) / MAX_STEPS)
    if every > 1:
        kept = [line for index, line in enumerate(lines) if index % every == 0]
        kept += [lines[-1]] if kept[-1] is not lines[-1] else []
        notes.append(
            f"Curves show {len(kept)} of {len(lines)} steps: every {every}th and the last."
        )
        lines = kept
    tags = sorted({tag for line in lines for tag in line} - {STEP, TIME, NOT_FINITE})
    return [line[STEP] for line in lines], {
        tag: [_round(line.get(tag)) for line in lines] for tag in tags
    }


def _axes(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Sampled tokens and hours of steps, from the first line up to each step's."""
    found: dict[str, dict[int, float]] = {"tokens": {}, "hours": {}}
    tokens = seconds = 0.0
    for line in lines:
        tokens += line.get("rollout/response_tokens") or 0
        seconds += line.get("timing/step") or 0
        found["tokens"][line[STEP]] = tokens
        found["hours"][line[STEP]] = round(seconds / 3600, 6)
    return found


def _round(value: Any) -> float | None:
    """Six digits, which is more than a screen shows."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _kinds(samples: Samples) -> dict[str, Any]:
    """Distributions by step and the heat map of problems, for training and each benchmark."""
    kinds = {}
    for kind in sorted(samples.figures, key=lambda name: (name != TRAINING, name)):
        by_step = samples.figures[kind]
        steps = sorted(by_step)
        every = math.ceil(len(steps) / MAX_STEPS)
        steps = steps[::every]
        statuses = sorted({status for step in steps for status in by_step[step]["statuses"]})
        kinds[kind] = {
            "steps": steps,
            **{
                key: [by_step[step][key] for step in steps]
                for key in ("samples", "lengths", "mean_reward", "truncated")
            },
            "rewards": [[_round(v) for v in by_step[step]["rewards"]] for step in steps],
            "statuses": {
                status: [by_step[step]["statuses"].get(status, 0) for step in steps]
                for status in statuses
            },
            "heat": heat_map(samples.grades[kind]),
        }
    return kinds


def _samples(
    samples: Samples, formulas_bytes: int, tokenizer: LightTokenizer | None, notes: list[str]
) -> dict[str, Any]:
    """The chosen samples, with each prompt and each formula once."""
    prompts: dict[str, int] = {}
    formulas = _Formulas(formulas_bytes)
    rows = []
    for row in samples.chosen:
        prompt = prompts.setdefault(row["prompt"], len(prompts))
        rows.append(
            {
                "kind": row["kind"],
                "step": row.get("step"),
                "problem": row["problem_id"],
                "index": row.get("index"),
                "prompt": prompt,
                "response": [[*part[:2], formulas.pieces(part[2])] for part in row["parts"]],
                "calls": row.get("calls"),
                "failure": row.get("failure"),
                **{key: row[key] for key in _ROW if key in row},
                "of_group": row["of_group"],
                "finish": row.get("finish_reason"),
                "tokens": row["response_tokens"],
                "version": row.get("weights_version"),
                "engine": row.get("engine"),
                # JavaScript's numbers end at 2**53.
                "by_token": token_table(tokenizer, row, row.get("trace")) if tokenizer else None,
                "seed": None if row.get("seed") is None else str(row["seed"]),
            }
        )
    shown = [formulas.pieces(prompt) for prompt in prompts]
    if tokenizer is None and any(row.get("trace") or "token_ids" in row for row in samples.chosen):
        notes.append("Values by token are not shown: the model's tokenizer.json is not here.")
    if formulas.left_out:
        notes.append(
            f"{formulas.left_out} formulas are shown as text: the page's {formulas_bytes:,} bytes "
            "for formulas are used up."
        )
    return {"prompts": shown, "formulas": formulas.table, "samples": rows}


class _Formulas:
    """Formulas of all texts, each once: ``[source, MathML as nested lists, whether it stands in its
    own line]``; ``left_out``: those that the limit made text."""

    def __init__(self, limit_bytes: int) -> None:
        self.table: list[list[Any]] = []
        self.left_out = 0
        self._numbers: dict[str, int | None] = {}
        self._left = limit_bytes

    def pieces(self, text: str) -> list[str | int]:
        """A text as strings and numbers of formulas."""
        result: list[str | int] = []
        for piece in math_text.split(text):
            number = None if isinstance(piece, str) else self._number(*piece)
            if number is not None:
                result.append(number)
                continue
            plain = piece if isinstance(piece, str) else piece[0]
            if result and isinstance(result[-1], str):
                result[-1] += plain
            else:
                result.append(plain)
        return result

    def _number(self, source: str, latex: str) -> int | None:
        if source in self._numbers:
            return self._numbers[source]
        tree = math_text.to_tree(latex)
        if tree is None:
            self._numbers[source] = None
            return None
        takes = len(json.dumps([source, tree]))
        if takes > self._left:
            self.left_out += 1
            return None
        self._left -= takes
        self._numbers[source] = len(self.table)
        self.table.append([source, tree, math_text.is_display(source)])
        return self._numbers[source]


def _omissions(run: RunFolder, samples: Samples, events: int) -> list[str]:
    """Notes about data that the page leaves out, and data that the run lacks."""
    notes = []
    total = sum(s["samples"] for kind in samples.figures.values() for s in kind.values())
    if missing := sum(samples.left_out.values()):
        notes.append(
            f"The viewer has {total - missing:,} of {total:,} samples: in every step the same "
            "problems, drawn by their ids. Distributions and pass rates are over all of them."
        )
    if not total:
        notes.append("The run's folder has no samples (runner.samples_keep_gib).")
    if samples.cut_texts:
        notes.append(f"{samples.cut_texts:,} characters in the middle of long texts are left out.")
    if events > MAX_EVENTS:
        notes.append(f"{MAX_EVENTS} of {events} events are marked, the first ones.")
    for name, count in sorted(run.damaged.items()):
        notes.append(f"samples/{name}: {count} damaged lines or ends are left out.")
    if samples.left_out_tokens:
        notes.append(
            f"{samples.left_out_tokens} samples that were traced are shown without values by "
            "token; those that have them are spread over the run."
        )
    notes.append(
        "Values by token (log-probs of engine, actor and reference model, entropy, advantage, what "
        "the update did) are kept of a few samples of each step: runner.token_samples."
    )
    return notes
