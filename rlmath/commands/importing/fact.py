"""One row of a framework's table: its setting, and the counterpart here.

The tables are the single source of ``rlmath import`` and of ``docs/coming_from.md``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmath.errors import UserError
from rlmath.model.lora import ALL_TARGETS

Settings = dict[str, Any]
# The value in a mapping that stands for all others.
OTHERWISE = object()
_TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard", "trackio")
EPOCHS = (
    "epochs have no counterpart: set runner.steps to epochs x rows / prompts_per_step, or import "
    "with --rows N"
)
_DATA_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True)
class Fact:
    # Its key. Names that other versions have for it follow, and patterns such as rollout.trace.*
    # for settings that are treated alike.
    theirs: str
    ours: str = ""  # Setting here; several are separated by spaces. Empty: none.
    default: Any = None  # Their default.
    # Their values and ours; a value that is not listed has no counterpart.
    values: Mapping[Any, Any] | None = None
    # Settings here, from all of theirs; given what a value alone does not say.
    convert: Callable[[Given], Settings] | None = None
    # For the page, and what to do where there is no counterpart. A function is also called to say
    # how the meaning differs in a run; its docstring is for the page.
    note: str | Callable[[Given], str] = ""
    harmless: bool = False  # Has no counterpart and no effect on learning.

    @property
    def key(self) -> str:
        return self.theirs.split()[0]


@dataclass(frozen=True)
class Framework:
    name: str
    version: str  # The framework's version that the table describes.
    facts: tuple[Fact, ...]
    always: tuple[str, ...] = ()  # Differences that no setting of theirs selects.
    # Settings here that no setting of theirs is the source of.
    base: Mapping[str, Any] = field(default_factory=dict)
    # Their settings that bound a run of epochs over N rows.
    run_length: Callable[[Given, int], Settings] | None = None


def when(text: str, condition: Callable[[Given], bool]) -> Callable[[Given], str]:
    def note(given: Given) -> str:
        return text if condition(given) else ""

    note.__doc__ = text
    return note


def elsewhere(given: Given) -> Settings:
    """Nothing: the conversion of another row reads the setting."""
    return {}


def lora_settings(rank: Any, alpha: Any, targets: Any) -> Settings:
    """Adapters, with the targets that exist here."""
    if not rank:
        return {}
    found: Settings = {"actor.lora.rank": int(rank), "actor.lora.alpha": alpha}
    known = [one for one in targets if one in ALL_TARGETS] if isinstance(targets, list) else []
    return found | ({"actor.lora.targets": known} if known else {})


def kl_in_reward(coef: Any, target: Any = None, horizon: Any = None) -> Settings:
    """A KL penalty in the reward, of which only k1 has the gradient; steered to ``target``."""
    found: Settings = {"algorithm.kl_coef": coef, "algorithm.kl_in": "reward"}
    found["algorithm.kl_estimator"] = "k1"
    if target:
        found |= {"algorithm.kl_target": target, "algorithm.kl_horizon_samples": horizon}
    return found


def data_paths(names: Any, config: Any = None, split: Any = None) -> list[str]:
    """Files and data sets of the hub, of one name or a list, as ``data.train_paths`` has them."""
    return [
        one if one.startswith(("/", ".", "~")) or one.endswith(_DATA_FILES)
        else f"hub:{one}:{config or ''}:{split or 'train'}"
        for one in map(str, names if isinstance(names, list) else [names])
    ]  # fmt: skip


def trackers(key: str) -> Callable[[Given], Settings]:
    def convert(given: Given) -> Settings:
        names = given[key] if isinstance(given[key], list) else [given[key]]
        known = [str(one) for one in names if str(one) in _TRACKERS]
        return {"runner.trackers": known or ["tensorboard"]}

    return convert


def every(ours: str, key: str) -> Callable[[Given], Settings]:
    """A number of steps, where below 0 is never."""
    return lambda given: {ours: max(0, given.whole(key))}


def overlong_reward(longest: int, buffer: int, factor: float) -> Settings:
    """The item of ``reward.items`` that is DAPO's penalty in all frameworks."""
    params = {"max_completion_len": longest, "soft_punish_cache": buffer}
    return {"name": "soft_overlong_punishment", "params": params, "weight": factor}


def nodes_settings(nodes: int) -> Settings:
    """A run over several nodes joins the Ray cluster that is there, as theirs do."""
    return {"cluster.nodes": nodes} | ({"cluster.ray_address": "auto"} if nodes > 1 else {})


class Given:
    """Their settings, by the names of the table's version, with their defaults."""

    def __init__(self, framework: Framework, values: Mapping[str, Any]) -> None:
        self.framework = framework
        self._rows: dict[str, Fact] = {}
        self._patterns: list[tuple[str, Fact]] = []
        for fact in framework.facts:
            for name in fact.theirs.split():
                if "*" in name:
                    self._patterns.append((name, fact))
                else:
                    self._rows[name] = fact
        self._defaults = {fact.key: fact.default for fact in framework.facts}
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, Any] = {}
        for name, value in values.items():
            row = self.fact(name)
            if row is None:
                self.unknown[name] = value
            else:
                self.values[row.key if row.ours else name] = value

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key, self._defaults[key])

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fact(self, name: str) -> Fact | None:
        # The longest pattern says most.
        found = [one for one in self._patterns if fnmatch.fnmatchcase(name, one[0])]
        row = max(found, key=lambda one: len(one[0]))[1] if found else None
        return self._rows.get(name) or row

    def number(self, key: str) -> float:
        """A setting that is a number. Raises UserError: it is none."""
        try:
            return float(self[key])
        except (TypeError, ValueError):
            raise UserError(
                f"{key}={self[key]}: this has to be a number; write it as one and import again"
            ) from None

    def whole(self, key: str) -> int:
        return int(self.number(key))

    def true(self, key: str) -> bool:
        return str(self[key]).lower() in ("true", "1", "yes")


@dataclass
class Imported:
    settings: Settings = field(default_factory=dict)  # Here, by key.
    # Settings of theirs that have no counterpart: key, value, and what to do.
    without: list[tuple[str, Any, str]] = field(default_factory=list)
    # Notes on settings whose meaning is different here.
    differs: list[str] = field(default_factory=list)


def translate(framework: Framework, values: Mapping[str, Any], rows: int | None = None) -> Imported:
    """An experiment's settings from another framework's.

    Their defaults count as given, since ours differ. ``rows``: number of training rows, which turns
    epochs into steps; ``None``: not known. Raises UserError: a value that is no number, or batch
    sizes that do not divide.
    """
    given = Given(framework, values)
    if rows is not None and framework.run_length is not None:
        given.values |= framework.run_length(given, rows)
    found = Imported(settings=dict(framework.base), differs=list(framework.always))
    for fact in framework.facts:
        if fact.ours:
            _apply(fact, given, found)
    for key, value in given.values.items():
        row = given.fact(key)
        if row and not row.ours and not row.harmless and value != row.default:
            text = row.note(given) if callable(row.note) else row.note
            found.without.append((key, value, text))
    unread = "not in the table of this version; nothing is taken from it"
    found.without += [(key, value, unread) for key, value in given.unknown.items()]
    return found


def _apply(fact: Fact, given: Given, found: Imported) -> None:
    value = given[fact.key]
    if fact.convert is not None:
        found.settings |= fact.convert(given)
    elif fact.values is not None:
        mapped = fact.values.get(str(value), OTHERWISE)
        if mapped is OTHERWISE:
            known = ", ".join(map(str, fact.values))
            found.without.append((fact.key, value, f"there is a counterpart for {known} alone"))
        elif mapped is not None:
            found.settings[fact.ours] = mapped
    elif value is not None:
        found.settings[fact.ours] = value
    text = fact.note(given) if callable(fact.note) else ""
    if text:
        found.differs.append(f"{fact.key}: {text}")
