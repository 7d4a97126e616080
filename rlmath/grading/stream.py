"""A position in a list of tokens, and the mutually recursive rules of the grammar."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlmath.grading.lexer import END, Token
from rlmath.grading.syntax import Node, ParseError

MAX_DEPTH = 40  # an answer nested more deeply is compared as a string only


class TokenStream(ABC):
    """One pass over the tokens of one answer."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.size = len(tokens)
        self.position = 0
        self.depth = 0
        self.bars = 0  # open |…|
        self.integrals = 0  # open integrals, where dx ends an argument
        self.braces = 0  # open sets, where a | means "such that"
        self.inner = 0  # open roots, fractions and exponents, where no bare unit stands

    def peek(self, offset: int = 0) -> Token:
        """The next token, or a later one; `END` at the end."""
        index = self.position + offset
        return self.tokens[index] if index < self.size else END

    def at(self, kind: str, value: str, offset: int = 0) -> bool:
        index = self.position + offset
        if index >= self.size:
            return False
        token = self.tokens[index]
        return token.kind == kind and token.value == value

    def op(self, value: str) -> bool:
        """Take the operator if it is next."""
        return self.take("op", value)

    def take(self, kind: str, value: str) -> bool:
        """Take the token if it is next."""
        found = self.at(kind, value)
        self.position += found
        return found

    def expect(self, kind: str, value: str) -> None:
        if not self.take(kind, value):
            raise ParseError(f"expected {value}")

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")

    def items_to(self, closer: str, kind: str = "op") -> tuple[Node, ...]:
        """The items up to a closing sign, which is consumed."""
        inner = self.items()
        self.expect(kind, closer)
        return tuple(inner[1]) if inner[0] == "list" else (inner,)

    # The grammar's entry points, defined further down the chain of classes.

    @abstractmethod
    def items(self) -> Node: ...

    @abstractmethod
    def sum(self) -> Node: ...

    @abstractmethod
    def term(self) -> Node: ...

    @abstractmethod
    def atom(self, script: bool = False) -> Node: ...

    @abstractmethod
    def application(self, name: str) -> Node: ...
