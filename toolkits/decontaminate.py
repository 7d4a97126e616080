"""Leave out training problems that share a run of 8 words with a problem of a benchmark.

    python toolkits/decontaminate.py datasets/dapo.jsonl --against datasets/benchmarks/*.jsonl \\
        --to datasets/dapo_clean.jsonl

A problem of fewer than 8 words, on either side, counts as shared when all its words stand side by
side in the other (from 5 words on; shorter ones when both are equal). Which problems were left out,
and for which words, is written beside the result (dapo_clean.left_out.jsonl).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from known_texts import NGRAM_WORDS, KnownTexts
from rlmath.config.command_line import take_settings
from rlmath.data.files import MalformedRowError, read_rows
from rlmath.errors import UserError
from rlmath.monitor.files import refuse_existing, replacing
from rlmath.utils.command_line import run_command

PROMPT_KEYS = ("prompt", "problem", "question")


def main(argv: Sequence[str]) -> int:
    """Run the command line; 0: written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="training problems")
    parser.add_argument("--against", type=Path, nargs="+", required=True, help="benchmarks")
    parser.add_argument("--to", type=Path, required=True, help="file to write, .jsonl")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    parser.add_argument("--words", type=int, default=NGRAM_WORDS, help="of a run (default 8)")
    parser.epilog = f"data.prompt_key=FIELD: the problem (default: the first of {PROMPT_KEYS})"
    given, rest = take_settings(argv, ("data.prompt_key",))
    arguments, key = parser.parse_args(rest), given.get("data.prompt_key")
    beside = arguments.to.with_suffix(".left_out.jsonl")
    refuse_existing("--to", (arguments.to, beside), overwrite=arguments.overwrite)
    known = KnownTexts(arguments.words, least=min(5, arguments.words))
    for row in read_rows(arguments.against):
        known.add(row.place, text_of(row.fields, row.place, None))
    kept, left_out = [], []
    for row in read_rows([arguments.file]):
        overlap = known.find(text_of(row.fields, row.place, key))
        if overlap is None:
            kept.append(row.fields)
        else:
            reason = {"left_out": row.place, "as": overlap.source, "words": overlap.words}
            left_out.append(reason)
    for path, rows in ((arguments.to, kept), (beside, left_out)):
        with replacing(path) as file:
            file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    print(f"{arguments.to}: {len(kept)} problems kept, {len(left_out)} left out, see {beside}")
    return 0


def text_of(fields: dict[str, Any] | MalformedRowError, place: str, key: str | None) -> str:
    """The problem of a row; of chat messages the last one's text.

    Raises:
        UserError: There is none.
    """
    if isinstance(fields, MalformedRowError):
        raise UserError(f"{place}: {fields}")
    names = PROMPT_KEYS if key is None else (key,)
    value = next((fields[name] for name in names if name in fields), None)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise UserError(
            f"{place}: no text in {' or '.join(names)}; its fields are {', '.join(fields)}; name "
            "the one with the problem: data.prompt_key=FIELD"
        )
    return value


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
