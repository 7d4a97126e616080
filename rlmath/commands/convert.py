"""``rlmath convert``: a run's checkpoint to a Hugging Face folder, or a folder to a checkpoint.

Sizes, type and layout are read from the checkpoint itself. It ends by reading what it wrote and
comparing every tensor; ``to-hf`` then compares the log-probabilities that Megatron, transformers
and vLLM have from the new folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlmath.config.command_line import Given
from rlmath.model.hub import local_model
from rlmath.utils.command_line import without_warnings

# For each direction, the settings of a run that mean the same here.
SETTINGS = {"to-hf": ("model.path", "plugins"), "to-megatron": ("model.dtype", "plugins")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    take.add_argument("model", help="Hugging Face folder, or ORGANIZATION/NAME on the hub")
    take.add_argument("checkpoint", type=Path, help="folder to write")
    export.epilog = (
        "model.path=FOLDER: the model that it started from (default: the run's); "
        "plugins=[FILE]: a model family of yours (default: the run's)"
    )
    take.epilog = (
        "model.dtype=float32: data type of the checkpoint (default: bfloat16); "
        "plugins=[FILE]: a model family of yours"
    )


def run(options: argparse.Namespace, given: Given) -> int:
    """Convert. Returns the exit code. Raises UserError: the input cannot be used, or the target is
    not to be replaced."""
    with without_warnings():
        return (_export if options.command == "to-hf" else _take)(options, given)


def _export(options: argparse.Namespace, given: Given) -> int:
    import torch

    from rlmath.validation.convert import (
        check_export_target,
        model_of_run,
        read_checkpoint,
        to_hf,
        use_plugins_of_run,
    )
    from rlmath.validation.processes import ONE_RANK, on_ranks

    saved = read_checkpoint(options.checkpoint)
    if "plugins" not in given.keys:
        use_plugins_of_run(options.checkpoint)
    path = given.get("model.path")
    source = model_of_run(options.checkpoint) if path is None else Path(path)
    folder, overwrite = options.folder, options.overwrite
    check_export_target(folder, options.checkpoint, source, overwrite)
    print(f"{saved.spec['architecture']}, saved at {saved.layout}, {saved.dtype}")
    count = on_ranks(ONE_RANK, to_hf, (options.checkpoint, folder, source, overwrite))
    print(f"{folder}: {count} tensors written, read again and equal", flush=True)
    if not options.no_alignment:
        from rlmath.engines.vllm_log_probs import vllm_side
        from rlmath.validation.compare import compare_on_ranks
        from rlmath.validation.probe import random_batch

        # Each in a process that ends before the next begins: they would not share a GPU's memory.
        batch = random_batch(source)
        others = {} if options.no_vllm else vllm_side(folder, batch, torch.float32)
        report = compare_on_ranks(folder, batch, ONE_RANK, torch.float32, others)
        print(report.table())
        report.check()
    return 0


def _take(options: argparse.Namespace, given: Given) -> int:
    from rlmath.checks.weight_files import refuse_broken_folder

    model = local_model(options.model)
    # Refuse a wrong folder before torch is imported.
    refuse_broken_folder(model)
    import torch

    from rlmath.validation.convert import to_megatron
    from rlmath.validation.processes import open_process

    dtype = getattr(torch, given.config.model.dtype.value)
    count = to_megatron(open_process(), model, options.checkpoint, dtype)
    print(f"{options.checkpoint}: {count} tensors written, read again and equal")
    return 0
