"""``rlmath publish``: a run's model with a card of its recipe, data and results, to a hub."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.checkpoint import CheckpointStore
from rlmath.config import attempts
from rlmath.errors import UserError
from rlmath.evaluation.results import read_results, table
from rlmath.monitor.files import replacing
from rlmath.monitor.summary import read_summary

CARD = "README.md"
# An absolute path says more of a machine than a card should.
_ABSOLUTE = re.compile(r"(?<![\w.~-])/(?:[^\s,\]'\"]*/)?([^/\s,\]'\"]+)")
HF = "hf"
# Settings that make the recipe, in the order in which they are read.
_RECIPE = (
    ("advantage", "algorithm.advantage"),
    ("policy loss", "algorithm.loss"),
    ("aggregation", "algorithm.aggregation"),
    ("prompts per step", "algorithm.prompts_per_step"),
    ("samples per prompt", "algorithm.group_size"),
    ("minibatches per step", "algorithm.minibatches_per_step"),
    ("clip, low and high", "algorithm.clip_low", "algorithm.clip_high"),
    ("KL coefficient", "algorithm.kl_coef"),
    ("learning rate", "actor.optimizer.lr"),
    ("schedule", "actor.optimizer.schedule"),
    (
        "longest prompt and response, tokens",
        "data.max_prompt_tokens",
        "rollout.max_response_tokens",
    ),
    ("sampling temperature", "rollout.temperature"),
    ("seed", "runner.seed"),
)


# Where and how a run is executed.
_NOT_IN_RECIPE = ("cluster", "runner", "watchdog", "weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``rlmath publish``."""
    parser.add_argument("run_dir", type=Path, help="a training run's folder")
    parser.add_argument("repo", help="ORGANISATION/NAME on the hub")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint", type=Path, help="publish this checkpoint, not the run's last model"
    )
    which.add_argument(
        "--every-checkpoint",
        action="store_true",
        help="publish each checkpoint of the run, each to its branch step-N",
    )
    parser.add_argument("--revision", help="branch; default: main, or step-N of a checkpoint")
    parser.add_argument("--public", action="store_true", help="a new repository is public")
    parser.add_argument("--card-only", action="store_true", help="print the card and stop")


def run(options: argparse.Namespace) -> int:
    """Upload a model folder with its card, or one of each checkpoint. Returns the exit code.

    Raises:
        UserError: The run has no model, or the hub refuses.
    """
    run_dir: Path = options.run_dir
    checkpoints: list[Path | None] = [options.checkpoint]
    if options.every_checkpoint:
        checkpoints = _checkpoints_of(run_dir, options.revision)
    for checkpoint in checkpoints:
        card = model_card(run_dir, step=_step_of(checkpoint))
        if options.card_only:
            print(card, end="")
        else:
            where = _upload(options, checkpoint, card)
            print(f"published: {where}", flush=True)
    return 0


def _checkpoints_of(run_dir: Path, revision: str | None) -> list[Path | None]:
    if revision is not None:
        raise UserError(
            f"--revision {revision}: with --every-checkpoint each has a branch of its own, step-N"
        )
    store = CheckpointStore(run_dir / "checkpoints", keep=1)
    if not store.steps():
        raise UserError(f"--every-checkpoint: there is none in {store.folder}")
    return [store.path(step) for step in store.steps()]


def _upload(options: argparse.Namespace, checkpoint: Path | None, card: str) -> str:
    run_dir: Path = options.run_dir
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".publish_") as scratch:
        folder = _folder(run_dir, checkpoint, Path(scratch) / HF)
        # A copy of the small files would be enough, but links cost nothing.
        upload = Path(scratch) / "upload"
        shutil.copytree(folder, upload, copy_function=_link)
        (upload / CARD).unlink(missing_ok=True)
        (upload / CARD).write_text(card, encoding="utf-8")
        revision = options.revision or _revision_of(checkpoint)
        return push(upload, options.repo, revision, private=not options.public)


def push(folder: Path, repo: str, revision: str, *, private: bool) -> str:
    """Upload a folder to a branch of a model repository, which is made if missing.

    Returns:
        Where it is.

    Raises:
        UserError: The hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=f"rlmath: {revision}",
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{repo} at {revision} could not be published: {reason}; log in with hf auth login, or "
            "set HF_TOKEN, and see that the name is ORGANISATION/NAME"
        ) from error
    return str(commit.commit_url)


def write_card(run_dir: Path) -> None:
    """Put the card into the run's model folder."""
    with replacing(run_dir / HF / CARD) as file:
        file.write(model_card(run_dir).encode())


def model_card(run_dir: Path, step: int | None = None) -> str:
    """The card: recipe, data, results, from what the run has left.

    Args:
        run_dir: A training run's folder.
        step: Of a checkpoint; ``None``: the run's end.

    Raises:
        UserError: It is no run's folder.
    """
    from omegaconf import OmegaConf

    found = attempts.attempts(run_dir)
    if not found:
        raise UserError(f"{run_dir} is no training run's folder: there is no config.yaml in it")
    config = OmegaConf.create(dict(attempts.in_force(found, step)))
    summary = read_summary(run_dir)

    def setting(key: str) -> str:
        return str(OmegaConf.select(config, key))

    base = Path(setting("model.path")).name
    rows = [(name, ", ".join(setting(key) for key in keys)) for name, *keys in _RECIPE]
    steps = step if step is not None else summary.get("steps")
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- rlmath",
        "- reinforcement-learning",
        "- math",
        "---",
        "",
        f"# {run_dir.resolve().name}",
        "",
        f"{base}, trained with reinforcement learning on mathematics problems by rlmath"
        + (f"; after step {steps}." if steps is not None else "."),
        "",
        "## Recipe",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "Every setting is below, for `rlmath train`; of absolute paths the last part.",
        "",
        *_changes_lines(attempts.history(found, step)),
        "## Data",
        "",
        *_data_lines(config),
        "",
        "## Results",
        "",
        *_result_lines(run_dir, summary, step),
        "",
        "## All settings",
        "",
        "```yaml",
        _ABSOLUTE.sub(r"\1", OmegaConf.to_yaml(config)).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _changes_lines(history: Sequence[tuple[int, list[attempts.Change]]]) -> list[str]:
    """What was in force before: each change of a setting, with the steps that it separates."""
    if not history:
        return []
    rows = [
        f"| {after} | `{one.key}` | {_shown(one.before)} | {_shown(one.now)} |"
        for after, changes in history
        for one in changes
        if one.key.partition(".")[0] not in _NOT_IN_RECIPE
    ]
    if not rows:
        return []
    return [
        "Settings that were changed during the run (the table above has the last values):",
        "",
        "| after step | setting | up to there | from there on |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _shown(value: Any) -> str:
    return _ABSOLUTE.sub(r"\1", "null" if value is None else str(value)).replace("|", "\\|")


def _data_lines(config: Any) -> list[str]:
    weights = list(config.data.get("train_weights") or [])
    files = [Path(str(path)).name for path in config.data.train_paths]
    shares = [f", weight {weight:g}" for weight in weights] or [""] * len(files)
    lines = [f"- training: `{name}`{share}" for name, share in zip(files, shares, strict=True)]
    return lines + [f"- held out: `{Path(str(p)).name}`" for p in config.data.eval_paths]


def _result_lines(run_dir: Path, summary: Mapping[str, Any], step: int | None) -> list[str]:
    lines = []
    before, after = summary.get("eval/accuracy_before"), summary.get("eval/accuracy_after")
    if step is None and before is not None and after is not None:
        lines.append(f"Accuracy on held-out problems went from {before:.3f} to {after:.3f}.")
    if step is not None:
        manifest = run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json"
        if manifest.is_file():
            metrics = json.loads(manifest.read_bytes()).get("metrics", {})
            lines += [f"- `{k}`: {v:.4f}" for k, v in metrics.items() if k.startswith("eval/")]
    entries = read_results(run_dir / "evaluation")
    if entries and step is None:
        lines += ["", table(entries), "", "Percent, ± one standard error over problems."]
    return lines or ["Not evaluated."]


def _folder(run_dir: Path, checkpoint: Path | None, scratch: Path) -> Path:
    """The Hugging Face folder to publish; a checkpoint's is written to ``scratch``."""
    if checkpoint is not None:
        from rlmath.evaluation.source import export_checkpoint
        from rlmath.weights.convert import model_of_run

        export_checkpoint(str(checkpoint), scratch, str(model_of_run(checkpoint)))
        return scratch
    folder = run_dir / HF
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not there: the run has not ended; name a --checkpoint")
    return folder


def _step_of(checkpoint: Path | None) -> int | None:
    if checkpoint is None:
        return None
    number = checkpoint.name.rpartition("_")[2]
    if not number.isdigit():
        raise UserError(f"{checkpoint}: give a folder such as checkpoints/step_000050")
    return int(number)


def _revision_of(checkpoint: Path | None) -> str:
    return "main" if checkpoint is None else f"step-{_step_of(checkpoint)}"


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())
