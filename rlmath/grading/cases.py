"""Parse `\\begin{cases}`: a function by cases, or a system of equations."""

from __future__ import annotations

from rlmath.grading.lexer import END, Token
from rlmath.grading.quantities import Quantities
from rlmath.grading.syntax import Node, ParseError

_CONDITION_WORDS = frozenset(("if", "for", "when", "where", "otherwise", "else"))


class Cases(Quantities):
    """Parses the rows of a definition by cases, in any of its environments."""

    def skip_columns(self, name: str) -> None:
        """Skip the `{ll}` after `\\begin{array}`."""
        if name == "array" and self.op("{"):
            while not self.op("}"):
                if self.position >= self.size:
                    raise ParseError("open array")
                self.position += 1

    def cases(self, name: str) -> Node:
        """A function by cases, or a system of equations if no row has a condition."""
        rows: list[list[Token]] = [[]]
        nested = 0
        while True:
            token = self.peek()
            if token is END:
                raise ParseError("open cases")
            self.position += 1
            if token.kind == "end" and token.value == name and not nested:
                break
            nested += (token.kind == "begin") - (token.kind == "end")
            if token.kind == "cmd" and token.value == "newline" and not nested:
                rows.append([])
            else:
                rows[-1].append(token)
        parts = [self.row(row) for row in rows if row]
        if not parts:
            raise ParseError("no cases")
        if all(condition is not None for _, condition in parts):
            return ("pieces", tuple(parts))
        if any(condition is not None for _, condition in parts):
            raise ParseError("a row without a condition")
        items = [item for e, _ in parts for item in (e[1] if e[0] == "list" else (e,))]
        return items[0] if len(items) == 1 else ("list", tuple(items), ",")

    def row(self, tokens: list[Token]) -> tuple[Node, Node | None]:
        tokens = _without_end(tokens)
        split = next((i for i, t in enumerate(tokens) if t[:2] == ("op", "&")), None)
        words = ((i, t.value.split()[0].lower()) for i, t in enumerate(tokens) if t.is_word)
        word = next((i for i, first in words if first in _CONDITION_WORDS), None)
        if split is None and word is None:
            node = self.apart(tokens)
            if node[0] == "list" and len(node[1]) == 2 and node[1][0][0] != "rel":
                first, second = node[1]
                if second[0] == "rel" and second[1] != ("=",):
                    return first, second
            return node, None
        at = word if split is None else split
        assert at is not None
        head = _without_end(tokens[:at])
        tail = _without_end([t for t in tokens[at:] if t.value != "&"])
        if not head or not tail:
            raise ParseError("half a case")
        aligned = head[-1][:2] == ("op", "=") or tail[0].value in ("=", "<", ">", "le", "ge")
        if split is not None and aligned:
            return self.apart(head + tail), None  # equations
        named = head[0] if len(head) == 1 and head[0].kind == "text" else None
        if named is not None and len(named.value) > 3:
            return ("text", named.value.lower()), self.condition(tail)  # converges
        return self.apart(head), self.condition(tail)

    def condition(self, tokens: list[Token]) -> Node:
        first = tokens[0]
        if first.is_word:
            words = first.value.split()
            while words and words[0].lower() in _CONDITION_WORDS - {"otherwise", "else"}:
                words.pop(0)
            rest = [first._replace(value=" ".join(words))] if words else []
            tokens = rest + tokens[1:]
        if not tokens:
            raise ParseError("no condition")
        try:
            node = self.apart(list(tokens))
            if node[0] in ("rel", "list"):
                return node
        except ParseError:
            pass
        words = [w for t in tokens for w in t.value.split()]
        return ("text", " ".join(w for w in words if w.lower() not in ("is", "an", "if", "a")))

    def apart(self, tokens: list[Token]) -> Node:
        """The tree of these tokens, parsed separately."""
        inner = type(self)(list(tokens))
        inner.depth = self.depth + 1
        node = inner.items()
        if inner.position < inner.size:
            raise ParseError("tokens left over in a row")
        return node


def _without_end(tokens: list[Token]) -> list[Token]:
    while tokens and tokens[-1].value in (",", ";", ".", ":"):
        tokens = tokens[:-1]
    return tokens
