"""Compare the log-probabilities of Megatron, transformers and vLLM on the same sequences.

    python toolkits/validate_logprobs.py models/Qwen2.5-1.5B --data responses.jsonl --out report

Each line of ``--data`` has ``prompt`` and ``response`` as text, such as a run's ``samples/``;
without it the sequences are random tokens. Prints a table; with ``--out`` writes ``report.json``
and ``report.png`` too. When Megatron and transformers are too far apart, names the first layer and
parameters that differ. Exit code 0: aligned, 1: not, 2: the input cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlmath.errors import UserError


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, help="jsonl with prompt and response")
    parser.add_argument("--sequences", type=int, default=8, help="how many at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--out", type=Path, help="path without ending for .json and .png")
    try:
        return _compare(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _compare(arguments: argparse.Namespace) -> int:
    import torch

    from rlmath.weights.alignment import compare_with_transformers
    from rlmath.weights.convert import open_process
    from rlmath.weights.probe import batch_of, random_batch
    from rlmath.weights.vllm_log_probs import vllm_log_probs

    dtype = getattr(torch, arguments.dtype)
    if arguments.data:
        batch = batch_of(_sequences(arguments.data, arguments.model, arguments.sequences))
    else:
        batch = random_batch(arguments.model, arguments.sequences)
    others = {}
    if not arguments.no_vllm:
        others["vllm"] = vllm_log_probs(arguments.model, batch, dtype)
    report = compare_with_transformers(arguments.model, batch, open_process(), dtype, others)
    print(report.table())
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(report.as_json() + "\n")
        report.plot(arguments.out.with_suffix(".png"))
    return 0 if report.good else 1


def _sequences(path: Path, model: Path, count: int) -> list[tuple[list[int], list[int]]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    result = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(result) == count:
                break
            try:
                row = json.loads(line)
                pair = row["prompt"], row["response"]
            except (ValueError, KeyError) as error:
                raise UserError(f"{path}:{number}: no prompt and response: {error!r}") from None
            prompt, response = (tokenizer.encode(t, add_special_tokens=False) for t in pair)
            result.append((prompt, response))
    if not result:
        raise UserError(f"{path} has no lines")
    return result


if __name__ == "__main__":
    sys.exit(main())
