"""Fetch a public data set and write it in the project's format, without duplicates.

    python toolkits/prepare_data.py dapo --to datasets
    python toolkits/prepare_data.py aime24 math500 --to datasets/benchmarks
    python toolkits/prepare_data.py orz --from orz_math_57k_collected.json --to datasets

Rows of one problem are written once; when they have different answers none is written. What is left
out is counted by reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hub_sources import SOURCES, Source, UnusableRowError
from known_texts import words_of
from rlmath.config.benchmarks import PUBLISHED
from rlmath.data.files import MalformedRowError, read_rows
from rlmath.errors import UserError
from rlmath.monitor.files import refuse_existing, replacing
from rlmath.utils.command_line import run_command


def main() -> int:
    """Run the command line; 0: written, 2: a message says why not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--to", type=Path, required=True, help="folder to write to")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.add_argument("--from", type=Path, dest="file", help="a file that was fetched already")
    arguments = parser.parse_args()
    try:
        unknown = [name for name in arguments.names if name not in SOURCES]
        if unknown:
            raise UserError(f"no data set {', '.join(unknown)}; there are {', '.join(SOURCES)}")
        if arguments.file and len(arguments.names) > 1:
            raise UserError("--from gives the file of one data set; name one")
        paths = {
            name: arguments.to / (PUBLISHED[name].file if name in PUBLISHED else f"{name}.jsonl")
            for name in arguments.names
        }
        refuse_existing("--to", paths.values(), overwrite=arguments.overwrite)
        for name, path in paths.items():
            source = SOURCES[name]
            raw = _from_file(arguments.file) if arguments.file else _from_hub(source)
            rows, left_out = convert(raw, source)
            if not rows:
                raise UserError(f"{name}: no row is left: {dict(left_out)}")
            with replacing(path) as file:
                file.writelines(
                    json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows
                )
            print(f"{path}: {len(rows)} rows; left out: {dict(left_out) or 'none'}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(raw: Iterable[Any], source: Source) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Rows in our format, and how many were left out for what reason.

    Raises:
        UserError: A row lacks a field: it is another data set.
    """
    left_out: Counter[str] = Counter()
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    contradicted: set[tuple[str, ...]] = set()
    for number, row in enumerate(raw, start=1):
        try:
            ours = source.convert(row)
        except UnusableRowError as error:
            left_out[str(error)] += 1
            continue
        except (KeyError, TypeError, IndexError) as error:
            has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise UserError(
                f"row {number} is not one of {source.hub}: {type(error).__name__} {error}; it has "
                f"{has}"
            ) from error
        problem, *_ = ours.values()
        key = words_of(problem)
        if key not in first:
            first[key] = ours
        elif list(first[key].values())[1] == list(ours.values())[1]:
            left_out["the same problem again"] += 1
        else:
            left_out["the same problem with another answer"] += 1
            contradicted.add(key)
    left_out["its problem has several answers"] += len(contradicted)
    rows = [row for key, row in first.items() if key not in contradicted]
    return rows, +left_out


def _from_hub(source: Source) -> Iterator[Any]:
    import datasets

    try:
        yield from datasets.load_dataset(
            source.hub, source.config, split=source.split, data_files=source.data_file
        )
    except Exception as error:
        raise UserError(
            f"{source.hub} could not be fetched ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}); "
            "fetch a file of it by other means and give it with --from"
        ) from error


def _from_file(path: Path) -> Iterator[Any]:
    for row in read_rows([path]):
        if isinstance(row.fields, MalformedRowError):
            # A conversation is a bare list, which is no row with fields.
            if path.suffix == ".json":
                yield from ({"conversations": item} for item in json.loads(path.read_bytes()))
                return
            raise UserError(f"{row.place}: {row.fields}")
        yield row.fields


if __name__ == "__main__":
    sys.exit(run_command(lambda _: main(), []))
