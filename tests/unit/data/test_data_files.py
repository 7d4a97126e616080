import json

import pyarrow
import pyarrow.parquet
import pytest

from rlmath.data.files import MalformedRowError, read_rows
from rlmath.errors import UserError

ROWS = [{"prompt": "1+1", "solutions": ["2"]}, {"prompt": "é漢", "solutions": ["x", "y"]}]


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


WRITERS = {
    "rows.jsonl": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "wrapped.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "rows.parquet": parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = list(read_rows([tmp_path / name]))
    assert [row.fields for row in rows] == ROWS
    assert [row.place for row in rows] == [f"{name}:1", f"{name}:2"]


def test_parquet_rows_are_numbered_over_batches(tmp_path):
    path = tmp_path / "many.parquet"
    table = pyarrow.table({"n": list(range(5000))})
    pyarrow.parquet.write_table(table, path)
    rows = list(read_rows([path]))
    assert all(row.place == f"many.parquet:{row.fields['n'] + 1}" for row in rows)
    assert len(rows) == 5000


def test_jsonl_places_are_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n  \r\n{"n": 2\n[3]\n{"n": "\xff"}\n{"n": 4}')
    rows = list(read_rows([path]))
    assert [row.place for row in rows] == [f"a.jsonl:{line}" for line in (1, 4, 5, 6, 7)]
    assert rows[0].fields == {"n": 1} and rows[4].fields == {"n": 4}
    messages = [str(row.fields) for row in rows[1:4]]
    assert all(isinstance(row.fields, MalformedRowError) for row in rows[1:4])
    # Which is after the end of a line that stops in the middle.
    assert messages[0] == "not a JSON object: Expecting ',' delimiter at character 9 of the line"
    assert messages[1] == "a row is an object with fields, this is a list"
    assert "utf-8" in messages[2]


def test_files_of_the_same_name_have_places_of_their_own(tmp_path):
    for folder in ("x/one", "x/two", "y/one"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "train.jsonl").write_text('{"a": 1}\n')
    paths = [tmp_path / folder / "train.jsonl" for folder in ("x/one", "x/two", "y/one")]
    assert [row.place for row in read_rows(paths)] == [
        "x/one/train.jsonl:1",
        "x/two/train.jsonl:1",
        "y/one/train.jsonl:1",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "data files end in .jsonl, .json, .parquet"),
        ("a.json", b"{1", "not JSON"),
        ("a.json", b"3", "a list of rows is wanted, this is a int"),
        ("a.json", b'{"x": [], "y": []}', r"2 lists in it \(x, y\)"),
        ("a.json", b'{"x": 1}', r"0 lists in it \(none\)"),
        ("a.parquet", b"no parquet", "not a parquet file"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(read_rows([tmp_path / name]))
    assert str(tmp_path / name) in str(caught.value)


def test_missing_files_folders_and_repetitions_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="there is no such file"):
        list(read_rows([tmp_path / "b.jsonl"]))
    with pytest.raises(UserError, match="is a folder"):
        list(read_rows([tmp_path]))
    with pytest.raises(UserError, match="given twice"):
        list(read_rows([tmp_path / "a.jsonl", tmp_path / "." / "a.jsonl"]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trian.jsonl", r"there is no such file; did you mean .*/train.jsonl\?$"),
        ("other.parquet", "there is no such file$"),
        ("dta/train.jsonl", "there is no such file, nor the folder .*/dta$"),
        (".", "is a folder; give the files in it$"),
    ],
)
def test_a_path_that_is_no_file(tmp_path, name, said):
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=said):
        list(read_rows([tmp_path / name]))
