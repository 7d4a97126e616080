"""Writes ``docs/coming_from.md``: ``python -m toolkits.pages.coming_from``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.commands.importing.cli import FRAMEWORKS
from rlmath.commands.importing.fact import Fact, Framework

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "coming_from.md"
# Files of examples/coming_from, with the language of each.
_EXAMPLES = {
    "verl": {"run.sh": "bash", "rewards.py": "python", "make_data.py": "python"},
    "trl": {"grpo.py": "python", "train.jsonl": "json"},
}

_HEAD = """# Coming from TRL, verl or OpenRLHF

This page is written by `python -m toolkits.pages.coming_from` from the tables in
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
  and `case` that compare texts are followed. Of a Python script, literals and constants are, and
  `load_dataset`.
- Reward functions of a TRL script become a file beside the experiments, `imported/NAME_rewards.py`,
  with the imports, constants and functions that they use: the script would train when it is
  imported. A function that the script imports from a file beside it is named there.

Reward functions work unchanged: TRL's, verl's `compute_score`, one by one or batched, OpenRLHF's
`reward_func` and slime's `custom_rm` ([rewards](rewards.md)). A loss or an advantage estimator of a
fork becomes a file of yours ([extending](extending.md)). `rlmath plan layout` proposes parallel
sizes, and `rlmath publish` is the counterpart of `push_to_hub`.
"""


_VERL_EXAMPLE = """## Example: a verl run

A command line, a reward function, and the data that it trains on, as verl has them:

{files}
Import it, look at what differs, and train:

    python make_data.py
    rlmath import run.sh
    rlmath train --config-dir imported experiment=run

On a machine without a GPU, try two steps with a tiny random model:

    rlmath train --config-dir imported experiment=run \\
        model.path=tiny model.dtype=float32 cluster.device=cpu runner.steps=2
"""
_TRL_EXAMPLE = """## Example: a TRL script

A script with its reward function, and its data:

{files}
`rlmath import` leaves the script as it is, and moves its reward function to
`imported/grpo_rewards.py`:

    rlmath import grpo.py
    rlmath train --config-dir imported experiment=grpo

On a machine without a GPU:

    rlmath train --config-dir imported experiment=grpo \\
        model.path=tiny model.dtype=float32 cluster.device=cpu runner.steps=2
"""


def page() -> str:
    examples = (
        _VERL_EXAMPLE.format(files=_files("verl")),
        _TRL_EXAMPLE.format(files=_files("trl")),
    )
    tables = (line for one in FRAMEWORKS.values() for line in _section(one))
    return "\n".join([_HEAD, *examples, *tables])


def _files(name: str) -> str:
    """Code blocks, each after the file's name."""
    folder = _ROOT / "examples" / "coming_from" / name
    return "\n".join(
        f"`{file}`\n\n```{language}\n{(folder / file).read_text(encoding='utf-8')}```\n"
        for file, language in _EXAMPLES[name].items()
    )


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
