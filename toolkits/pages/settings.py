"""Writes ``docs/settings.md`` from the sections' fields: ``python -m toolkits.pages.settings``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omegaconf import MISSING

from rlmath.config.options import SECTIONS
from rlmath.config.settings import Setting, settings

SETTINGS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_HEAD = """# Settings

Every setting, its type, default and range. `python -m toolkits.pages.settings` writes this page
from the sections in `rlmath/config/`; change it there.

A setting is given on the command line as `key=value` (`rlmath train experiment=quickstart
actor.optimizer.lr=5e-5`), or in a file of `conf/`. Groups of settings have named options, chosen
as `group=option` (`cluster=gpu8`); an experiment chooses an option of each group and sets what is
its own. Later ones win: the defaults below, then `conf/GROUP/OPTION.yaml`, then
`conf/experiment/NAME.yaml`, then the command line. Options of your own go in a folder with the
same groups, given as `--config-dir`.

A value may refer to another setting: `model.path='${runner.run_dir}/model'`. No value can therefore
contain `${` itself; a path that does is an error. Rename the file or folder, or link to it.

`rlmath settings clip` prints the settings that have this word in their key or meaning; with
`plugins='[my_file.py]'` also the options of your own parts. In bash,
`complete -o nospace -W "$(rlmath settings --keys)" rlmath` completes keys.

A loss, an advantage estimator and a group filter have their own options:
`algorithm.loss_options.clip_high=0.28`. An option that the chosen one does not have is an error.
`algorithm.loss=NAME` on the command line starts from the defaults of that loss: options that files
give to another loss are dropped.

A recipe, `recipe=dapo`, sets the algorithm, the optimizer and the rewards of a paper
([algorithms](algorithms.md#recipes)).

`rlmath train ... --cfg` prints the resolved settings; `rlmath train ... --check` checks them and
the files that they name, prints the batch arithmetic, and stops.
"""


def settings_page() -> str:
    sections: dict[str, list[Setting]] = {}
    for setting in settings():
        sections.setdefault(_section(setting), []).append(setting)
    parts = [_HEAD, *_table("The settings that most users change", _common())]
    for section, members in sections.items():
        parts += _table(section, members)
        for options in SECTIONS:
            parent, _, chooser = options.chooser.rpartition(".")
            if section == parent:
                for names, found in options.options_by_names():
                    parts += _table(f"{options.key} of {chooser}={', '.join(names)}", found)
    return "\n".join(parts)


def _common() -> list[Setting]:
    """The marked settings. Of an optimizer's, which several sections share, the actor's."""
    found: dict[str, Setting] = {}
    for setting in settings():
        if setting.common:
            found.setdefault(setting.doc, setting)
    return list(found.values())


def _table(title: str, members: Iterable[Setting]) -> list[str]:
    head = [f"## {title}\n", "| setting | type | default | meaning |\n|---|---|---|---|"]
    rows = [_row(setting) for setting in members]
    return [*head, *rows[:-1], rows[-1] + "\n"]


def _section(setting: Setting) -> str:
    return setting.key.rsplit(".", 1)[0]


def _row(setting: Setting) -> str:
    kind = setting.type_text
    if str(setting.limits) != "finite":
        kind = f"{kind}, {setting.limits}"
    given = setting.default is MISSING
    default = setting.default_text if given else f"`{setting.default_text}`"
    pairs = [f"`{one.other}`{f' ({one.value})' * bool(one.value)}" for one in setting.not_with]
    meaning = setting.doc + (f" Not with {', '.join(pairs)}." if pairs else "")
    cells = (f"`{setting.key}`", kind, default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    SETTINGS_PAGE.parent.mkdir(exist_ok=True)
    SETTINGS_PAGE.write_text(settings_page(), encoding="utf-8")
    print(f"wrote {SETTINGS_PAGE}")
