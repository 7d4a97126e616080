"""Where the settings' files are, and which options their groups have. Imports no Hydra."""

from __future__ import annotations

from pathlib import Path

# ``rlmath/conf`` is a link to the repository's ``conf/``; in an installed wheel it is a folder.
CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


def options(group: str, config_dir: str | Path | None = None) -> list[str]:
    """Names that ``group=...`` takes, for example the experiments."""
    folders = [CONF_DIR] + ([Path(config_dir)] if config_dir is not None else [])
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
