"""A run of a few steps with all parts of a plug-in, whose second half is repeated from a save."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlmath.commands.drill.shrink import shrink
from rlmath.commands.plugin_test.finding import Finding
from rlmath.commands.recipe_test.run import run_test
from rlmath.config.quoting import quoted_path
from rlmath.config.settings import replace_values

STEPS = 4
NAMES = {
    "invariants": "a run of steps holds its invariants, the ledger among them",
    "resume is equal": "a resumed run is equal to the last bit",
}


def check_in_run(place: str, chosen: Mapping[str, str], folder: Path) -> Iterator[Finding]:
    """Run the quickstart, shrunk, with the plug-in."""
    source = chosen.get("data.source")
    given = [
        "quickstart",
        f"plugins=[{quoted_path(place)}]",
        *(f"{key}={value}" for key, value in chosen.items() if key != "data.source"),
    ]
    shrunk = shrink(given, folder, None, STEPS)
    if source is not None:
        # The model is made with problems that it is given as a file.
        config = replace_values(shrunk.config, {"data.source": source})
        shrunk = dataclasses.replace(shrunk, config=config)
    for one in run_test(shrunk, folder, None):
        if one.name in NAMES:
            yield Finding(NAMES[one.name], "" if one.ok else one.text)
