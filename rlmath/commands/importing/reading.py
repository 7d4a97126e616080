"""Settings of another framework as its users keep them: YAML, JSON, shell script, Python script.

Nothing is executed. In a shell script, assignments, ``${NAME:-default}``, arithmetic and arrays are
evaluated, and the first branch of an ``if`` or ``case`` that holds is read. :mod:`.script` reads
Python scripts.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlmath.commands.importing.script import OPERATIONS, python_settings
from rlmath.errors import UserError

Values = dict[str, Any]
VERL, TRL, OPENRLHF = "verl", "TRL", "OpenRLHF"
_OPENRLHF_MAIN = re.compile(r"openrlhf\.cli\.\w+")
_VERL_KEY = re.compile(r"\+{0,2}[a-z_]\w*(\.[\w@]+)+=|\+{0,2}model_engine=")
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SPREAD = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_DEFAULT = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
# The script's folder, and commands that print a folder.
_HERE = re.compile(r"""\$\(dirname\s+(?:--\s+)?"?(?:\$0|\$\{?BASH_SOURCE(?:\[0\])?\}?)"?\s*\)""")
_FOLDER = re.compile(
    r"""\$\((?:cd\s+"?([^"()]+?)"?\s*&&\s*pwd|realpath\s+"?([^"()]+?)"?|pwd)\s*\)"""
)
_ARITHMETIC = re.compile(r"\$\(\(([^$`()]*(?:\([^()]*\)[^$`()]*)*)\)\)")


def read(file: Path, processes: int | None = None) -> tuple[str, Values, list[str]]:
    """The framework and settings of a file.

    Args:
        processes: Number of processes of TRL's launch; ``None``: the file's, if it has any.

    Returns:
        The framework, its settings by key, and what could not be read, one line each.

    Raises:
        UserError: The file is missing, cannot be parsed, or is of no framework that is known.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    unread: list[str] = []
    if file.suffix in (".yaml", ".yml", ".json"):
        name, values = _parse_structured(file, text)
    elif file.suffix == ".py":
        name, values = TRL, python_settings(file, text, unread)
    else:
        name, values = shell_settings(file, text, unread)
    if name == TRL and processes is not None:
        values["processes"] = processes
    return name, values, unread


def _parse_structured(file: Path, text: str) -> tuple[str, Values]:
    try:
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{file}: has to be a mapping of settings")
    if "actor_rollout_ref" in content or "data" in content:
        references = flat(content)
        return VERL, {key: _resolve(value, references) for key, value in references.items()}
    return TRL, {str(key): _number(value) for key, value in content.items()}


def flat(content: Mapping[Any, Any], prefix: str = "") -> Values:
    """Nested settings by dotted key; without Hydra's own."""
    found: Values = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        elif not (str(key).startswith("_") or name.startswith(("defaults", "hydra"))):
            found[name] = _number(value)
    return found


def _resolve(value: Any, values: Values) -> Any:
    """``${a.b}`` and ``${oc.select:a.b,default}`` replaced by their values."""
    reference = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}", str(value))
    if reference is None:
        return value
    key, default = reference[1], reference[2]
    return values.get(key, None if default is None else plain(default.strip()))


def plain(text: str) -> Any:
    """The value in a word of a command line, as YAML has it; numbers such as 1e-6 as well."""
    try:
        return _number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(one) for one in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        return float(value)
    return None if value in ("null", "None") else value


# -- shell scripts ------------------------------------------------------------------------------


def shell_settings(file: Path, text: str, unread: list[str]) -> tuple[str, Values]:
    """The settings of a script that starts verl, OpenRLHF or ``trl grpo``."""
    if "openrlhf" in text:
        name = OPENRLHF
    elif "verl" in text or _VERL_KEY.search(text):
        name = VERL
    elif "GRPOConfig" in text or re.search(r"trl grpo|grpo\w*\.py", text):
        name = TRL
    else:
        raise UserError(f"{file}: starts none of verl, OpenRLHF and TRL that rlmath import knows")
    commands = _Shell(file.parent, unread).commands(text)
    if name == OPENRLHF:
        commands = [_of_training(words) for words in commands]
    flat_words = list(itertools.chain(*commands))
    if name != VERL:
        return name, _options(flat_words)
    values: Values = {}
    for word in flat_words:
        if _VERL_KEY.match(word):
            key, _, value = word.lstrip("+").partition("=")
            if value:
                values[key] = plain(value)
            else:
                unread.append(f"{key}: its value is not in the script, so its default counts")
    if not values:
        raise UserError(f"{file}: has no key=value of verl, such as data.train_batch_size=1024")
    return name, values


def _of_training(words: list[str]) -> list[str]:
    """The words after OpenRLHF's program; empty for another command, such as Ray's."""
    # Slurm scripts have the program in a text that another shell runs.
    if any(" " in word and _OPENRLHF_MAIN.search(word) for word in words):
        words = shlex.split(" ".join(words))
    after = itertools.dropwhile(lambda word: not _OPENRLHF_MAIN.fullmatch(word), words)
    return list(after)[1:]


def _options(words: list[str]) -> Values:
    """``--key value ...`` and ``--key``, with dashes in names as underscores."""
    values: Values = {}
    key = None
    given: list[Any] = []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if key:
                values[key] = True if not given else given[0] if len(given) == 1 else given
            key, _, text = word[2:].replace("-", "_").partition("=")
            given = [plain(text)] if text else []
        elif key:
            given.append(plain(word))
    return values


class _Shell:
    """The words of the commands of a script, with its variables filled in."""

    def __init__(self, folder: Path, unread: list[str]) -> None:
        self.values: dict[str, str] = {"HOME": "~"}
        self.folder = folder
        self.arrays: dict[str, list[str]] = {}
        self.unread = unread
        # For each open if or case, whether one of its branches was taken.
        self._taken: list[bool] = []
        self._skips: list[bool] = []

    def commands(self, text: str) -> list[list[str]]:
        found: list[list[str]] = []
        text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
        for line in self._lines(re.sub(r"\\\s*\n", " ", text)):
            if self._branch(line) or any(self._skips):
                continue
            assignment = _ASSIGNMENT.match(line)
            if assignment and not _VERL_KEY.match(line):
                self._assign(assignment[1], bool(assignment[2]), assignment[3].strip())
            else:
                found.append(self._expand(line))
        return found

    @staticmethod
    def _lines(text: str) -> list[str]:
        """Lines; those of an array or of quotes over several lines are joined."""
        lines: list[str] = []
        held = ""
        for line in text.split("\n"):
            held = f"{held}\n{line}" if held else line
            body = held.strip()
            begins_array = re.match(r"\w+\+?=\(", body)
            if begins_array and held.count("(") > held.count(")"):
                continue
            if held.count('"') % 2 or (held.count("'") % 2 and '"' not in held):
                continue
            if body:
                lines.append(body)
            held = ""
        return [*lines, held.strip()] if held.strip() else lines

    def _branch(self, line: str) -> bool:
        """Whether the line is of an if or a case; of these the first branch that holds is read."""
        first = line.split()[0]
        if first in ("if", "case"):
            is_case = first == "case"
            self._taken.append(False)
            self._skips.append(is_case)
            if not is_case:
                self._choose(self._holds(line))
            else:
                self._subject = self._fill(line.split()[1].strip('"'))
            if re.search(r"\b(fi|esac)\s*$", line):
                self._end()
            return True
        if first in ("fi", "esac", "fi;", "done"):
            if first != "done":
                self._end()
            return True
        if not self._taken:
            return first in ("for", "while", "do")
        if first in ("elif", "else"):
            self._choose(first == "else" or self._holds(line))
            return True
        pattern = re.match(r"([\w*.|\s-]+)\)(.*)$", line)
        if pattern and "=" not in pattern[1]:
            names = [one.strip() for one in pattern[1].split("|")]
            self._choose("*" in names or getattr(self, "_subject", "") in names)
            return True
        return False

    def _choose(self, holds: bool) -> None:
        if not self._taken:
            return
        taken = holds and not self._taken[-1]
        self._skips[-1] = not taken
        self._taken[-1] |= taken

    def _end(self) -> None:
        if self._taken:
            self._taken.pop()
            self._skips.pop()

    def _holds(self, line: str) -> bool:
        """Whether a comparison of texts holds; any other condition counts as false."""
        test = re.search(r'\[\[?\s+"?([^"\]]*?)"?\s+(==?|!=)\s+"?([^"\]]*?)"?\s+\]', line)
        if test is None:
            return False
        left, right = self._fill(test[1]), self._fill(test[3])
        return (left == right) == (test[2] != "!=")

    def _assign(self, name: str, adds: bool, value: str) -> None:
        if value.startswith("("):
            inside = re.sub(r"(^|\s)#[^\n]*", " ", value).strip()[1:].rstrip().rstrip(")")
            self.arrays[name] = (self.arrays.get(name, []) if adds else []) + self._expand(inside)
        else:
            words = self._expand(value)
            self.values[name] = words[0] if words else ""

    def _expand(self, line: str) -> list[str]:
        for name in _SPREAD.findall(line):
            line = re.sub(
                r'"?\$\{' + name + r'\[[@*]\]\}"?',
                lambda _, n=name: " ".join(map(shlex.quote, self.arrays.get(n, []))),  # type: ignore[misc]
                line,
            )
        try:
            return shlex.split(self._fill(line), comments=True)
        except ValueError:
            self.unread.append(f"not read: {line[:60]!r}: its quotes do not close")
            return []

    def _fill(self, text: str) -> str:
        text = _HERE.sub(lambda _: str(self.folder), text)
        for _ in range(8):
            before = text
            text = _DEFAULT.sub(self._value, text)
            text = _ARITHMETIC.sub(self._sum, text)
            if text == before:
                break
        text = re.sub(r"\$\([^()]*\|\|\s*echo\s+(\w+)\s*\)", r"\1", text)
        text = _FOLDER.sub(lambda found: found[1] or found[2] or ".", text)
        if "$(" in text or "`" in text:
            text = re.sub(r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`", "", text)
        return text

    def _value(self, match: re.Match[str]) -> str:
        name, default, bare = match[1], match[2], match[3]
        known = self.values.get(name or bare)
        if known:
            return known
        return (default or "").strip("\"'") if default is not None else ""

    def _sum(self, match: re.Match[str]) -> str:
        text = re.sub(r"[A-Za-z_]\w*", lambda one: self.values.get(one[0], "0"), match[1])
        if not re.fullmatch(r"[\d\s+*/%()-]+", text):
            return ""
        try:
            return str(_arithmetic(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return ""


def _arithmetic(node: ast.expr) -> int:
    """As a shell computes: division of whole numbers is whole."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.BinOp):
        kind = ast.FloorDiv if isinstance(node.op, ast.Div) else type(node.op)
        if kind in OPERATIONS:
            return int(OPERATIONS[kind](_arithmetic(node.left), _arithmetic(node.right)))
    raise ValueError(ast.dump(node))
