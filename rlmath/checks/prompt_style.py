"""How problems become prompts where the settings leave it open: from the model and the data.

An instruct model gets its chat template, and prompts are asked to box their answer where only a
boxed answer counts. Prompts that are rendered already, such as AReaL-boba's, stay as they are.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmath.config.benchmarks import BOXED
from rlmath.config.data_sources import DATA_SOURCES
from rlmath.config.hub_names import is_hub
from rlmath.config.reward import CompletionFormat, RewardConfig
from rlmath.config.schema import Config
from rlmath.data.fields import field_of, has_field
from rlmath.data.files import MalformedRowError, Row, read_rows
from rlmath.data.markers import asks_for_box, has_markers, prompt_texts
from rlmath.data.source_stream import first_rows
from rlmath.errors import UserError
from rlmath.grading.settings import Fallback
from rlmath.grading.verifiers import VERIFIERS
from rlmath.model.chat import CLOCK, has_chat_template, is_instruct, read_chat_template
from rlmath.model.folder import TINY
from rlmath.plugins.source import is_path
from rlmath.rewards.registry import any_graded

# The unchanged problem.
BARE = "{prompt}"
_PEEKED = 4


def needs_box(config: Config) -> bool:
    """Whether a reward finds the answer in a box alone."""
    graded = any_graded(item.name for item in config.reward.items)
    verifier = config.reward.verifier
    if verifier is not None and VERIFIERS.has(verifier):
        graded = graded and not VERIFIERS.traits(verifier).whole_response
    return graded and config.reward.fallback is Fallback.none


def expects_request(config: Config) -> bool:
    """Whether prompts that do not ask for a box are a sign of an error: worked examples of
    ``sft.train_paths`` teach a model to box without."""
    return needs_box(config) and not config.sft.train_paths


def with_prompt_style(config: Config, command: str) -> Config:
    """The settings with ``data.apply_chat_template``, ``data.prompt_template`` and
    ``data.template_date`` decided; those that are given stay.

    Args:
        config: The model is a folder, or ``tiny``; one that is still on the hub, or missing, counts
            as without a chat template.
        command: ``train``, ``sft`` or ``evaluate``: whose files are looked at.
    """
    data, path = config.data, config.model.path
    row = _first_row(config, command)
    value = field_of(row, data.prompt_key) if has_field(row, data.prompt_key) else None
    chat, template, date = data.apply_chat_template, data.prompt_template, data.template_date
    if chat is None:
        several = isinstance(value, list) and len(value) > 1
        wants = is_instruct(path) or several or data.system_prompt is not None
        chat = has_chat_template(path) and wants and not has_markers(value)
    if template is None:
        template = BOXED if _wants_request(config, command, row, value, chat) else BARE
    if date is None and chat and _reads_clock(path):
        date = datetime.date.today().isoformat()
    decided = replace(data, apply_chat_template=chat, prompt_template=template, template_date=date)
    if data.apply_chat_template is None and isinstance(value, str):
        config = replace(config, reward=_for_texts(config.reward))
    return replace(config, data=decided)


def _for_texts(reward: RewardConfig) -> RewardConfig:
    """Functions of the user's get strings where the data has strings: the template was our choice,
    not theirs."""
    items = [
        replace(item, completion_format=CompletionFormat.text)
        if item.completion_format is None and is_path(item.name)
        else item
        for item in reward.items
    ]
    return replace(reward, items=items)


def _wants_request(
    config: Config, command: str, row: dict[str, Any], value: Any, chat: bool
) -> bool:
    """Whether a request for a box belongs to the prompts."""
    rendered = has_markers(value) and not chat
    asked = any(asks_for_box(text) for text in prompt_texts(value)) or (
        config.data.system_prompt is not None and asks_for_box(config.data.system_prompt)
    )
    if rendered or asked or not needs_box(config):
        return False
    key = config.sft.response_key
    if command == "sft" and has_field(row, key):
        return asks_for_box(str(field_of(row, key)))  # Examples show the form that is asked for.
    return True


def _first_row(config: Config, command: str) -> dict[str, Any]:
    """The first usable row of the first file that is here; empty: there is none."""
    paths: Sequence[str] = config.data.train_paths
    if command == "sft":
        paths = config.sft.train_paths
    elif command == "train" and config.data.source is not None:
        if not DATA_SOURCES.has(config.data.source):
            return {}
        (first,) = first_rows(config.data, 1)
        return first.fields if isinstance(first.fields, dict) else {}
    elif command == "evaluate" or not paths:
        paths = config.data.eval_paths
    for path in paths:
        if is_hub(path) or not Path(path).exists():
            continue
        try:
            rows: list[Row] = list(itertools.islice(read_rows([path]), _PEEKED))
        except UserError:  # Told by the check of the files.
            continue
        for row in rows:
            if not isinstance(row.fields, MalformedRowError):
                return row.fields
    return {}


def _reads_clock(path: str) -> bool:
    try:
        template = None if path == TINY else read_chat_template(Path(path))
    except ValueError:
        return False
    return template is not None and CLOCK in template
