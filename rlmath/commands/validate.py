"""``rlmath validate``: log-probabilities of Megatron, transformers and vLLM on the same sequences.

Settings of ``actor`` give Megatron the run's layout, with a process for each rank; without
``model.dtype`` all compute in float32. Each line of ``--data`` has ``prompt`` and ``response`` as
text, such as a run's ``samples/``; without it the sequences are random tokens. Prints a table; with
``--out`` writes ``report.json`` and ``report.png`` too. When Megatron and transformers are too far
apart, names the first layer and parameters that differ. Exit code 0: aligned, 1: not, 2: the input
cannot be used.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from rlmath.config.command_line import Given, count
from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.model.hub import local_model
from rlmath.model.parallel import Layout
from rlmath.monitor.files import refuse_existing
from rlmath.utils.command_line import without_warnings

# Settings of a run that mean the same here.
SETTINGS = (
    "plugins",
    "model.dtype",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.expert_parallel",
    "actor.sequence_parallel",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="Hugging Face folder, or ORGANIZATION/NAME on the hub")
    parser.add_argument("--data", type=Path, help="jsonl with prompt and response")
    parser.add_argument("--sequences", type=count, default=8, help="how many at most")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--out", type=Path, help="path without ending for .json and .png")
    parser.add_argument("--overwrite", action="store_true", help="replace those files")
    parser.epilog = f"settings, as key=value: {', '.join(SETTINGS)}"


def run(options: argparse.Namespace, given: Given) -> int:
    """Compare. Returns the exit code. Raises UserError: the model, the sequences or the layout
    cannot be used."""
    if options.out:
        refuse_existing("--out", _files(options.out), overwrite=options.overwrite)
    with without_warnings():
        return _compare(options, given)


def _compare(options: argparse.Namespace, given: Given) -> int:
    from rlmath.checks.weight_files import refuse_broken_folder

    model = local_model(options.model)
    # A wrong folder does not wait for torch.
    refuse_broken_folder(model)
    import torch

    from rlmath.engines.vllm_log_probs import vllm_side
    from rlmath.validation.compare import compare_on_ranks
    from rlmath.validation.probe import batch_of, random_batch

    dtype = given.get("model.dtype")
    dtype = torch.float32 if dtype is None else getattr(torch, dtype.value)
    layout, sequence_parallel = _layout(model, given.config)
    if options.data:
        batch = batch_of(_sequences(options.data, model, options.sequences))
    else:
        batch = random_batch(model, options.sequences)
    others = {} if options.no_vllm else vllm_side(model, batch, dtype)
    report = compare_on_ranks(model, batch, layout, dtype, others, sequence_parallel)
    print(report.table())
    if options.out:
        _files(options.out)[0].write_text(report.as_json() + "\n")
        report.plot(_files(options.out)[1])
    return 0 if report.good else 1


def _files(out: Path) -> tuple[Path, Path]:
    return out.with_suffix(".json"), out.with_suffix(".png")


def _layout(model: Path, config: Config) -> tuple[Layout, bool]:
    """Megatron's layout, and whether it shares tokens; refused where the model does not divide."""
    from rlmath.checks.layout import divided_layout
    from rlmath.model.spec import read_model_spec

    actor, spec = config.actor, read_model_spec(model)
    layout, tp = divided_layout(config, spec), actor.tensor_parallel
    if actor.sequence_parallel and tp == 1:
        raise UserError(
            "actor.sequence_parallel=true: it shares tokens between tensor-parallel ranks, and "
            "actor.tensor_parallel is 1"
        )
    # Tensor-parallel ranks would all send every token to the experts.
    return layout, actor.sequence_parallel or (spec.experts > 0 and tp > 1)


def _sequences(path: Path, model: Path, count: int) -> list[tuple[list[int], list[int]]]:
    from transformers import AutoTokenizer

    from rlmath.checks.data_rows import rows_of
    from rlmath.data.files import MalformedRowError

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    result: list[tuple[list[int], list[int]]] = []
    for row in itertools.islice(rows_of(str(path)), count):
        if isinstance(row.fields, MalformedRowError):
            raise UserError(f"{row.place}: {row.fields}")
        if not {"prompt", "response"} <= {*row.fields}:
            raise UserError(f"{row.place}: no prompt and response")
        pair = row.fields["prompt"], row.fields["response"]
        prompt, response = (tokenizer.encode(t, add_special_tokens=False) for t in pair)
        result.append((prompt, response))
    return result
