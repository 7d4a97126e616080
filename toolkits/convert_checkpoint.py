"""Turn a run's checkpoint into a Hugging Face folder, or a Hugging Face folder into a checkpoint.

    python toolkits/convert_checkpoint.py to-hf runs/mine/checkpoints/step_000050 out/
    python toolkits/convert_checkpoint.py to-megatron models/Qwen2.5-1.5B out/

Sizes, type and layout are read from the checkpoint itself. It ends by reading what it wrote and
comparing every tensor; ``to-hf`` then compares the log-probabilities that Megatron, transformers
and vLLM have from the new folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.config.command_line import Given, take_settings
from rlmath.utils.command_line import run_command

if TYPE_CHECKING:
    from rlmath.device import Platform


# Of each direction: settings of a run that mean the same here, and options that they were.
SETTINGS = {
    "to-hf": ("model.path",),
    "to-megatron": ("model.dtype",),
}


def main(argv: Sequence[str]) -> int:
    """Run the command line; 0: converted and equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("to-hf", help="checkpoint to Hugging Face folder")
    export.add_argument("checkpoint", type=Path)
    export.add_argument(
        "folder", type=Path, help="to write; a model there is replaced, anything else is refused"
    )
    export.add_argument(
        "--overwrite", action="store_true", help="replace the folder whatever it holds"
    )
    export.add_argument("--no-alignment", action="store_true", help="compare tensors alone")
    export.add_argument("--no-vllm", action="store_true", help="align without vLLM")
    take = commands.add_parser("to-megatron", help="Hugging Face folder to checkpoint")
    take.add_argument("model", type=Path)
    take.add_argument("checkpoint", type=Path, help="folder to write")
    export.epilog = "model.path=FOLDER: the model that it started from (default: the run's)"
    take.epilog = "model.dtype=float32: data type of the checkpoint (default: bfloat16)"
    given, rest = take_settings(argv, SETTINGS["to-hf" if "to-hf" in argv else "to-megatron"])
    arguments = parser.parse_args(rest)
    return (_export if arguments.command == "to-hf" else _take)(arguments, given)


def _export(arguments: argparse.Namespace, given: Given) -> int:
    import torch

    from rlmath.validation.convert import check_export_target, model_of_run, read_checkpoint
    from rlmath.validation.processes import ONE_RANK, on_ranks

    saved = read_checkpoint(arguments.checkpoint)
    path = given.get("model.path")
    source = model_of_run(arguments.checkpoint) if path is None else Path(path)
    folder, overwrite = arguments.folder, arguments.overwrite
    check_export_target(folder, arguments.checkpoint, source, overwrite)
    print(f"{saved.spec['architecture']}, saved at {saved.layout}, {saved.dtype}")
    count = on_ranks(ONE_RANK, _to_hf, (arguments.checkpoint, folder, source, overwrite))
    print(f"{folder}: {count} tensors written, read again and equal", flush=True)
    if not arguments.no_alignment:
        from rlmath.validation.compare import compare_on_ranks
        from rlmath.validation.probe import random_batch
        from rlmath.validation.vllm_log_probs import vllm_log_probs

        # Each in a process that ends before the next begins: they would not share a GPU's memory.
        batch, others = random_batch(source), {}
        if not arguments.no_vllm:
            others["vllm"] = vllm_log_probs(folder, batch, torch.float32)
        report = compare_on_ranks(folder, batch, ONE_RANK, torch.float32, others)
        print(report.table())
        report.check()
    return 0


def _to_hf(
    platform: Platform, checkpoint: Path, folder: Path, source: Path, overwrite: bool
) -> int:
    from rlmath.validation.convert import to_hf

    return to_hf(checkpoint, folder, source, platform, overwrite)


def _take(arguments: argparse.Namespace, given: Given) -> int:
    from rlmath.checks.weight_files import refuse_broken_folder

    # A wrong folder does not wait for torch.
    refuse_broken_folder(arguments.model)
    import torch

    from rlmath.validation.convert import to_megatron
    from rlmath.validation.processes import open_process

    dtype = getattr(torch, given.config.model.dtype.value)
    count = to_megatron(arguments.model, arguments.checkpoint, dtype, open_process())
    print(f"{arguments.checkpoint}: {count} tensors written, read again and equal")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
