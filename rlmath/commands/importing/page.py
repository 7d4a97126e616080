"""Writes ``docs/coming_from.md``: ``python -m rlmath.commands.importing.page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.commands.importing.cli import FRAMEWORKS
from rlmath.commands.importing.fact import Fact, Framework

PAGE = Path(__file__).resolve().parents[3] / "docs" / "coming_from.md"

_HEAD = """# Coming from TRL, verl or OpenRLHF

This page is written by `python -m rlmath.commands.importing.page` from the tables in
`rlmath/commands/importing/`; change it there.

## Import a configuration

    rlmath import run.sh                        # verl, OpenRLHF: a script with the command line
    rlmath import grpo.py --gpus 8              # TRL: a script with GRPOConfig; YAML and JSON too

`rlmath import` reads the file, executes nothing, and writes `imported/experiment/NAME.yaml`. It
prints which settings have no counterpart (`none`), what differs in meaning (`differs`) and what it
could not read (`unread`); then check the experiment:

    rlmath train --config-dir imported experiment=run --check

- Their defaults are written out, because ours differ.
- Epochs have no counterpart; with `--rows N`, the rows of the training data, they become
  `runner.steps`.
- TRL's number of processes stands in the command of accelerate: give it as `--gpus`.
- `model.path` and `data.train_paths` are placeholders if the file names none.
- Of a shell script, assignments, `${NAME:-default}`, arithmetic, arrays and the branches of `if`
  and `case` that compare texts are followed. Of a Python script, literals and constants are.

Reward functions work unchanged: TRL's, verl's `compute_score`, one by one or batched, OpenRLHF's
`reward_func` and slime's `custom_rm` ([rewards](rewards.md)). A loss or an advantage estimator of a
fork becomes a file of yours ([extending](extending.md)). `rlmath plan layout` proposes parallel
sizes, and `rlmath publish` is the counterpart of `push_to_hub`.
"""


def page() -> str:
    """The page's text."""
    return "\n".join([_HEAD, *(line for one in FRAMEWORKS.values() for line in _section(one))])


def _section(framework: Framework) -> Iterator[str]:
    yield f"## From {framework.name} {framework.version}\n"
    for text in framework.always:
        yield f"- {text[0].upper()}{text[1:]}."
    for key, value in framework.base.items():
        yield f"- `{key}` is {'null' if value is None else f'`{value}`'}."
    yield f"\n| {framework.name} | default | rlmath |\n|---|---|---|"
    for fact in framework.facts:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(fact)) + " |"
    yield ""


def _cells(fact: Fact) -> Iterator[str]:
    yield ", ".join(f"`{name}`" for name in fact.theirs.split())
    yield "" if fact.default is None else f"`{fact.default}`"
    ours = ", ".join(f"`{key}`" for key in fact.ours.split())
    if fact.values:
        pairs = ((str(theirs), value) for theirs, value in fact.values.items())
        ours += ": " + ", ".join(a if a == str(b) else f"{a} is {b or 'off'}" for a, b in pairs)
    text = fact.note if isinstance(fact.note, str) else fact.note.__doc__ or ""
    nothing = "not needed" if fact.harmless else "none"
    yield "; ".join(filter(None, (ours or nothing, " ".join(text.split()))))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
