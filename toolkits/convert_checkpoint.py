"""Turn a run's checkpoint into a Hugging Face folder, or a Hugging Face folder into a checkpoint.

    python toolkits/convert_checkpoint.py to-hf runs/mine/checkpoints/step_000050 out/
    python toolkits/convert_checkpoint.py to-megatron models/Qwen2.5-1.5B out/

Sizes, type and layout are read from the checkpoint itself. It ends by reading what it wrote and
comparing every tensor; ``to-hf`` then compares log-probabilities of Megatron and transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlmath.errors import UserError


def main() -> int:
    """Run the command line; 0: converted and equal, 2: a message says why not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("to-hf", help="checkpoint to Hugging Face folder")
    export.add_argument("checkpoint", type=Path)
    export.add_argument("folder", type=Path, help="to write; an older one is replaced")
    export.add_argument(
        "--model", type=Path, help="Hugging Face folder it started from (default: the run's)"
    )
    export.add_argument("--no-alignment", action="store_true", help="compare tensors alone")
    take = commands.add_parser("to-megatron", help="Hugging Face folder to checkpoint")
    take.add_argument("model", type=Path)
    take.add_argument("checkpoint", type=Path, help="folder to write")
    take.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args()
    try:
        return _export(arguments) if arguments.command == "to-hf" else _take(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _export(arguments: argparse.Namespace) -> int:
    from rlmath.weights.convert import model_of_run, read_checkpoint, to_hf
    from rlmath.weights.processes import open_process

    saved = read_checkpoint(arguments.checkpoint)
    source = arguments.model or model_of_run(arguments.checkpoint)
    print(f"{saved.shape['architecture']}, saved at {saved.layout}, {saved.dtype}")
    platform = open_process()
    count = to_hf(arguments.checkpoint, arguments.folder, source, platform)
    print(f"{arguments.folder}: {count} tensors written, read again and equal")
    if not arguments.no_alignment:
        from rlmath.weights.alignment import compare_with_transformers
        from rlmath.weights.probe import random_batch

        result = compare_with_transformers(arguments.folder, random_batch(source), platform)
        assert result is not None, "the only rank reports"
        print(result.table())
        result.check()
    return 0


def _take(arguments: argparse.Namespace) -> int:
    import torch

    from rlmath.weights.convert import to_megatron
    from rlmath.weights.processes import open_process

    dtype = getattr(torch, arguments.dtype)
    count = to_megatron(arguments.model, arguments.checkpoint, dtype, open_process())
    print(f"{arguments.checkpoint}: {count} tensors written, read again and equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
