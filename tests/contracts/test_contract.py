"""A contract that is broken is seen, by import and in source, and the message says what breaks."""

import dataclasses

import pytest

from tests.contracts import contract
from tests.contracts.contract import Row, check

HERE = "tests.contracts.test_contract"
LIMIT = 3


class Base:
    def __init__(self, size):
        self.size = size


class Thing(Base):
    kind = "thing"

    def grow(self, by, *, slowly=False):
        self._grown = by
        return self.size + by

    @property
    def open(self):
        return True


@dataclasses.dataclass
class Parts:
    first: int
    second: int = 0


HOLDS = [
    Row(HERE, "x", has=("Thing", "LIMIT")),
    Row(f"{HERE}:Thing", "x", has=("size", "_grown", "kind", "grow", "open"), takes=("size",)),
    Row(f"{HERE}:Thing._grown", "x"),
    Row(f"{HERE}:Thing.grow", "x", takes=("slowly",), passes=("by", "slowly")),
    Row(f"{HERE}:Thing.grow", "x", says=("return self.size + by",)),
    Row(f"{HERE}:Parts", "x", fields=("first",), all_fields=("second", "first")),
    Row(f"{HERE}:LIMIT", "x", equals=3),
    Row(f"{HERE}:Thing.kind", "x", equals="thing"),
]
BROKEN = [
    Row(f"{HERE}:Gone", "x"),
    Row(f"{HERE}:Thing.gone", "x"),
    Row(f"{HERE}:Thing", "x", has=("gone",)),
    Row(f"{HERE}:Thing", "x", takes=("width",)),
    Row(f"{HERE}:Thing.grow", "x", takes=("fast",)),
    Row(f"{HERE}:Thing.grow", "x", passes=("by",)),
    Row(f"{HERE}:Thing.grow", "x", says=("return self.size - by",)),
    Row(f"{HERE}:Parts", "x", fields=("third",)),
    Row(f"{HERE}:Parts", "x", all_fields=("first",)),
    Row(f"{HERE}:LIMIT", "x", equals=4),
]


@pytest.fixture(params=["imported", "in source"])
def how(request, monkeypatch):
    if request.param == "in source":
        monkeypatch.setattr(contract, "import_or_none", lambda _: None)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("row", HOLDS, ids=lambda row: row.target)
def test_valid_row_passes(row):
    check(row)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row.target)
def test_broken_row_says_what_breaks(row):
    with pytest.raises(pytest.fail.Exception, match=r": x$"):
        check(row)
