"""``rlmath settings``: all settings with type, range, default and meaning."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from rlmath.config.load import load
from rlmath.config.options import SECTIONS, benchmark_options
from rlmath.config.settings import Setting, settings
from rlmath.errors import UserError
from rlmath.utils.close_names import did_you_mean

_WIDTH = 100
# Required settings, which have no influence on the output.
_GIVEN = ("model.path=tiny", "runner.run_dir=runs/none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD|key=value",
        help="words of a key or its meaning; key=value such as plugins=[my_file.py], whose options "
        "are then among the settings",
    )
    parser.add_argument(
        "--keys", action="store_true", help="print the keys alone, for the shell's completion"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the settings that have all words. Returns the exit code. Raises UserError: none has."""
    words = [word.lower() for word in arguments.words if "=" not in word]
    load([*_GIVEN, *(word for word in arguments.words if "=" in word)])
    known = list(known_settings())
    found = [
        (setting, of)
        for setting, of in known
        if all(word in f"{setting.key} {setting.doc} {of}".lower() for word in words)
    ]
    if not found:
        names = {part for setting, _ in known for part in setting.key.split(".")}
        hint = "".join(did_you_mean(word, names) for word in words)
        raise UserError(f"rlmath settings: no setting has {' and '.join(words)} in it{hint}")
    if arguments.keys:
        print("\n".join(dict.fromkeys(f"{one.key}=" for one, _ in found if "[]" not in one.key)))
    else:
        print("\n\n".join(describe(setting, of) for setting, of in found))
    return 0


def known_settings() -> Iterator[tuple[Setting, str]]:
    """Each setting; for an option also the choice that it belongs to."""
    for setting in settings():
        yield setting, ""
    for section in (*SECTIONS, benchmark_options()):
        for names, options in section.options_by_names():
            for option in options:
                yield option, f"with {section.chooser}={', '.join(names)}"


def describe(setting: Setting, of: str) -> str:
    kind = setting.type_text
    if str(setting.limits) != "finite":
        kind = f"{kind}, {setting.limits}"
    head = f"{setting.key}  {of}".rstrip()
    meaning = textwrap.fill(setting.doc, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{head}\n    {kind}; default {setting.default_text}\n{meaning}"
