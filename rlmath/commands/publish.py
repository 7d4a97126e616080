"""``rlmath publish``: a run's model, with a card of recipe, data and results, to hub or folder."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from rlmath.checkpoint import CheckpointStore
from rlmath.config.command_line import Given
from rlmath.errors import UserError
from rlmath.training.model_card import CARD, HF, HF_ADAPTER, model_card

# Settings of a run that mean the same here.
SETTINGS = ("eval.checkpoint",)
# How a target begins that is no name of the hub.
_FOLDER = ("/", "./", "../", "~")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="a training run's folder")
    parser.add_argument(
        "repo",
        help="ORGANIZATION/NAME on the hub, or a new folder that begins with /, ./, ../ or ~",
    )
    parser.epilog = "eval.checkpoint=FOLDER: publish this checkpoint, not the run's last model"
    parser.add_argument(
        "--every-checkpoint",
        action="store_true",
        help="publish each checkpoint of the run, each to its branch step-N",
    )
    parser.add_argument("--revision", help="branch; default: main, or step-N of a checkpoint")
    parser.add_argument("--public", action="store_true", help="a new repository is public")
    parser.add_argument("--card-only", action="store_true", help="print the card and exit")


def run(options: argparse.Namespace, given: Given) -> int:
    """Upload a model folder with its card, or one of each checkpoint. Returns the exit code. Raises
    UserError: the run has no model, or the hub refuses."""
    checkpoint: str | None = given.get("eval.checkpoint")
    run_dir: Path = options.run_dir
    checkpoints: list[Path | None] = [None if checkpoint is None else Path(checkpoint)]
    if options.every_checkpoint:
        if checkpoint is not None:
            raise UserError(f"eval.checkpoint={checkpoint}: give it or --every-checkpoint")
        checkpoints = _checkpoints_of(run_dir, options.revision)
    for one in checkpoints:
        card = model_card(run_dir, step=_step_of(one))
        if options.card_only:
            print(card, end="")
        else:
            where = _upload(options, one, card)
            print(f"published: {where}", flush=True)
    return 0


def _checkpoints_of(run_dir: Path, revision: str | None) -> list[Path | None]:
    if revision is not None:
        raise UserError(
            f"--revision {revision}: with --every-checkpoint each has its own branch, step-N"
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
        if checkpoint is None and (run_dir / HF_ADAPTER).is_dir():
            shutil.copytree(run_dir / HF_ADAPTER, upload / HF_ADAPTER, copy_function=_link)
        (upload / CARD).unlink(missing_ok=True)
        (upload / CARD).write_text(card, encoding="utf-8")
        step = _step_of(checkpoint)
        revision = options.revision or ("main" if step is None else f"step-{step}")
        if options.repo.startswith(_FOLDER):
            target = Path(options.repo).expanduser()
            return _copy(upload, target if revision == "main" else target / revision)
        return push(upload, options.repo, revision, private=not options.public)


def _copy(folder: Path, target: Path) -> str:
    """Copy a model folder to a new one; raises UserError when something is there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there; give a folder that is new or empty")
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return str(target)


def push(folder: Path, repo: str, revision: str, *, private: bool) -> str:
    """Upload a folder to a branch of a model repository, which is made if missing. Raises
    UserError: the hub cannot be reached or refuses."""
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
            "set HF_TOKEN, and see that the name is ORGANIZATION/NAME"
        ) from error
    return str(commit.commit_url)


def _folder(run_dir: Path, checkpoint: Path | None, scratch: Path) -> Path:
    """The Hugging Face folder to publish; a checkpoint's is written to ``scratch``."""
    if checkpoint is not None:
        from rlmath.evaluation.source import export_checkpoint
        from rlmath.validation.convert import model_of_run

        export_checkpoint(str(checkpoint), scratch, str(model_of_run(checkpoint)))
        return scratch
    folder = run_dir / HF
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not there: the run has not ended; give eval.checkpoint")
    return folder


def _step_of(checkpoint: Path | None) -> int | None:
    if checkpoint is None:
        return None
    number = checkpoint.name.rpartition("_")[2]
    if not number.isdigit():
        raise UserError(f"{checkpoint}: give a folder such as checkpoints/step_000050")
    return int(number)


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())
