"""The export without its weights, before a run: what is written of configuration, tokenizer and
chat template has to load as what it came from."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from rlmath.data import load_tokenizer
from rlmath.errors import UserError
from rlmath.weights.hf_files import write_model_files

_TEXT = "Put 3/4 in \\boxed{}.\n  Grüße, 日本 <|im_end|>"


def rehearse_export(model: str | Path) -> None:
    """Write and read all of an export but the tensors. ``model``: folder of the model that is
    trained. Raises UserError: it would fail at the end of the run, or give another tokenizer."""
    theirs = load_tokenizer(model)
    with tempfile.TemporaryDirectory(prefix="rlmath_export_") as folder:
        try:
            write_model_files(Path(folder), Path(model), torch.float32)
            _check_config(Path(model), folder)
            ours = load_tokenizer(folder)
        except Exception as error:
            raise UserError(
                f"model.path={model}: the run could not export its model at the end: "
                f"{str(error).replace(folder, 'the export')}. Repair the folder's configuration "
                "and tokenizer files"
            ) from error
    differing = [
        what
        for what, one, other in (
            ("chat template", theirs.chat_template, ours.chat_template),
            ("end of sequence", theirs.eos_token_id, ours.eos_token_id),
            ("vocabulary size", len(theirs), len(ours)),
            ("tokens of a text", theirs(_TEXT)["input_ids"], ours(_TEXT)["input_ids"]),
        )
        if one != other
    ]
    if differing:
        raise UserError(
            f"model.path={model}: the tokenizer of the run's export would differ in "
            f"{', '.join(differing)}; save the tokenizer with transformers' save_pretrained, so "
            "that all of it is in tokenizer.json, tokenizer_config.json and chat_template.jinja"
        )


def _check_config(model: Path, export: str) -> None:
    """Raise where transformers reads the model's configuration, but not the export's."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(model), local_files_only=True)
    except Exception:
        return  # The engines report the error.
    AutoConfig.from_pretrained(export, local_files_only=True)
