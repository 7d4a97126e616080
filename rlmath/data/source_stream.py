"""Problems from a data source of a user's, row by row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlmath.config.data_sources import DATA_SOURCES, DataSource
from rlmath.config.schema import DataConfig, OverlongPrompt
from rlmath.data.files import Row
from rlmath.data.prompts import Encoder, PromptRenderer
from rlmath.data.rows import answers_in, problem_of, usable_rows
from rlmath.data.stream import other_data
from rlmath.errors import UserError
from rlmath.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Rows in a row that may be malformed, too long or on cooldown.
MOST_UNUSABLE = 1000


def open_source(data: DataConfig) -> DataSource:
    assert data.source is not None
    options = DATA_SOURCES.options(data.source).of(data.source_options)
    return DATA_SOURCES.get(data.source)(options)


def first_rows(data: DataConfig, count: int) -> list[Row]:
    """The first rows of ``data.source``, of one that is made for it. Raises UserError: it raises,
    or gives something else than rows."""
    name = str(data.source)
    try:
        given = list(itertools.islice(iter(open_source(data)), count))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.source={name}: its first rows cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not given:
        raise UserError(f"data.source={name}: it has no rows")
    return [row_of(name, number, fields) for number, fields in enumerate(given, start=1)]


def row_of(name: str, number: int, fields: Any) -> Row:
    """A row of a plug-in with its place: its ``id``, or its number. Raises UserError: it is no
    mapping, or JSON cannot keep it for a resume."""
    if not isinstance(fields, Mapping):
        raise UserError(f"{name}: row {number} is a {type(fields).__name__}, not a mapping")
    try:
        plain = json.loads(json.dumps(dict(fields)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: row {number} has a value that JSON has not: {error}") from error
    return Row(f"{name.rpartition(':')[2]}:{plain.get('id', number)}", plain)


class SourceStream:
    """The problems of a data source, in its order; a :class:`rlmath.data.stream.Stream`."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._data, self._name = data, str(data.source)
        self._renderer, self._encoder = PromptRenderer(data, tokenizer), Encoder(tokenizer)
        self._target = answers_in(data.answer_key)
        # Rows given so far, of them in this epoch and in the one before.
        self._taken = self._of_epoch = self._of_last = 0
        self._known: dict[str, Problem] = {}
        self._begin(None)

    def _begin(self, state: dict[str, Any] | None) -> None:
        self._source = open_source(self._data)
        if state is not None:
            self._source.load_state_dict(state)
        self._rows: Iterator[Any] = iter(self._source)

    def __len__(self) -> int:
        return self._of_last or MOST_UNUSABLE

    def __contains__(self, id_: str) -> bool:
        return id_ in self._known

    def __getitem__(self, id_: str) -> Problem:
        """A problem since the last snapshot, or one that was in use then."""
        return self._known[id_]

    def next(self, k: int) -> list[Problem]:
        """The next ``k`` problems. Raises UserError: a row that cannot be read or is too long,
        where the settings say stop, or too many of them one after another."""
        return [self._next() for _ in range(k)]

    def _next(self) -> Problem:
        why = ""
        for _ in range(MOST_UNUSABLE):
            found = self._problem(self._row())
            if isinstance(found, Problem):
                self._known[found.id] = found
                return found
            why = found
        raise UserError(f"data.source={self._name}: {MOST_UNUSABLE} rows in a row, such as {why}")

    def _row(self) -> Row:
        fields = next(self._rows, None)
        if fields is None:
            self._of_last, self._of_epoch = self._of_epoch, 0
            self._rows = iter(self._source)
            fields = next(self._rows, None)
        if fields is None:
            raise UserError(
                f"data.source={self._name}: it has no rows after {self._taken}; when its rows end, "
                "iter() of it has to begin with the first one again"
            )
        self._taken += 1
        self._of_epoch += 1
        return row_of(self._name, self._taken, fields)

    def _problem(self, row: Row) -> Problem | str:
        data = self._data
        drafts, skipped = usable_rows([row], data, self._renderer, self._target)
        if not drafts:
            return skipped[0]
        chat = bool(data.apply_chat_template)
        (ids,) = self._encoder.encode([drafts[0].prompt], add_first_tokens=not chat)
        if len(ids) <= data.max_prompt_tokens:
            return problem_of(drafts[0], ids, data, self._renderer)
        message = f"{row.place}: {len(ids)} tokens, data.max_prompt_tokens={data.max_prompt_tokens}"
        if data.overlong_prompts is OverlongPrompt.stop:
            raise UserError(f"{message}; raise it, or use data.overlong_prompts=filter")
        return message

    def state_dict(self) -> dict[str, Any]:
        """The place, with all problems since the last snapshot."""
        return self._state(self._known)

    def snapshot(self, in_use: Collection[str] = ()) -> Callable[[], dict[str, Any]]:
        """The current place, with the rows of the problems that are in use; the others are
        forgotten."""
        self._known = {id_: self._known[id_] for id_ in in_use}
        state = self._state(self._known)
        return lambda: state

    def _state(self, known: Mapping[str, Problem]) -> dict[str, Any]:
        plain = {
            "source": self._name,
            "state": self._source.state_dict(),
            "taken": self._taken,
            "of_epoch": self._of_epoch,
            "of_last": self._of_last,
            "rows": {id_: problem.columns for id_, problem in known.items()},
        }
        try:
            copied: dict[str, Any] = json.loads(json.dumps(plain))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.source={self._name}: state_dict() has a value that JSON has not: {error}"
            ) from error
        return copied

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place. Raises UserError: it is a place in other data."""
        if state.get("source") != self._name:
            raise other_data("data.source", state.get("source", "null"), self._name)
        self._taken, self._of_epoch = int(state["taken"]), int(state["of_epoch"])
        self._of_last = int(state["of_last"])
        self._known = {}
        for id_, fields in state["rows"].items():
            problem = self._problem(Row(id_, fields))
            if not isinstance(problem, Problem):
                raise UserError(f"a problem of the checkpoint cannot be used any more: {problem}")
            self._known[id_] = problem
        self._begin(state["state"])
