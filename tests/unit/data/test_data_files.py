import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from rlmath.config.schema import DataConfig
from rlmath.data import load_problems
from rlmath.data.files import MalformedRowError, read_rows
from rlmath.errors import UserError

ROWS = [{"prompt": "1+1", "solutions": ["2"]}, {"prompt": "é漢", "solutions": ["x", "y"]}]


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def jsonl_text():
    return "".join(json.dumps(row) + "\n" for row in ROWS)


def compress(path):
    with pyarrow.output_stream(str(path), compression="detect") as out:
        out.write(jsonl_text().encode())


def save_dataset(path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))


def arrow(path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as to:
        to.write_table(table)


def file_per_problem(path):
    for number, row in enumerate(ROWS):
        (path / f"topic{number}").mkdir(parents=True)
        (path / f"topic{number}" / "1.json").write_text(json.dumps(row))


WRITERS = {
    "rows.jsonl": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "wrapped.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "rows.parquet": parquet,
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "rows.jsonl.gz": compress,
    "rows.jsonl.zst": compress,
    "rows.arrow": arrow,
    "saved": save_dataset,
    "problems": file_per_problem,
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
    # A line that stops in the middle has its error after its end.
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
        ("a.txt", b"", "data files end in .jsonl, .json, .csv, .parquet, .arrow"),
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


def test_csv_rows_are_read_as_texts(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], ["1,\n+1", 2], ["x"]])
    rows = list(read_rows([path]))
    assert rows[0].fields == {"question": "1,\n+1", "answer": "2"}
    assert "another number of fields" in str(rows[1].fields)


def test_a_saved_data_set_of_several_splits_names_them(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"several splits; give .*/train or .*/test$"):
        list(read_rows([tmp_path]))


def test_a_file_of_a_folder_that_is_not_json_is_one_malformed_row(tmp_path):
    file_per_problem(tmp_path / "p")
    (tmp_path / "p" / "topic0" / "2.json").write_text("{")
    rows = [row.fields for row in read_rows([tmp_path / "p"])]
    assert rows[0] == ROWS[0] and rows[2] == ROWS[1]
    assert "topic0/2.json: not JSON" in str(rows[1])


def test_a_truncated_compressed_file_is_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl_text().encode())[:-9])
    with pytest.raises(UserError, match=r"not a \.jsonl\.gz file that can be read"):
        list(read_rows([path]))


def test_another_format_is_refused_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(UserError, match=r"pandas.read_excel\('.*a.xlsx'\).to_json\('a.jsonl'"):
        list(read_rows([tmp_path / "a.xlsx"]))


FIELDS = {
    "gsm8k_train.jsonl": ("question", "answer", 7473),
    "gsm8k_test.jsonl": ("question", "answer", 1319),
    "aime24.jsonl": ("problem", "answer", 30),
    "amc23.jsonl": ("question", "answer", 40),
    "minerva_math.jsonl": ("problem", "solution", 272),
    "olympiadbench.jsonl": ("question", "final_answer", 675),
    "mawps.jsonl": ("input", "target", 2065),
}


# gsm8k_test has the same fields, and the report below reads gsm8k_train.
LONG = ("gsm8k_train.jsonl",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FIELDS]
)
def test_every_row_is_read(real_data, tokenizer, name):
    prompt_key, answer_key, rows = FIELDS[name]
    settings = DataConfig(prompt_key=prompt_key, answer_key=answer_key, max_prompt_tokens=8192)
    problems, report = load_problems([real_data / name], settings, tokenizer)
    assert (report.kept, report.golds.num_bad) == (rows, 0)
    assert len({problem.id for problem in problems}) == rows
    # NFC, as Qwen2's tokenizer does, is the only change that a text may undergo.
    sample = problems[:: max(rows // 50, 1)]
    assert all(
        tokenizer.decode(p.prompt_token_ids) == p.prompt for p in sample if p.prompt.isascii()
    )
    if name.startswith("gsm8k"):
        assert all(float(problem.answers[0]) == int(problem.answers[0]) for problem in problems)
        assert not any(
            mark in answer for p in problems for answer in p.answers for mark in ("#", ",", "<<")
        )


def test_known_answers(real_data, tokenizer):
    def answers(name):
        prompt_key, answer_key, _ = FIELDS[name]
        settings = DataConfig(prompt_key=prompt_key, answer_key=answer_key, max_prompt_tokens=8192)
        problems, _ = load_problems([real_data / name], settings, tokenizer, limit=4)
        return [problem.answers for problem in problems]

    assert answers("gsm8k_test.jsonl") == [("18",), ("3",), ("70000",), ("540",)]
    assert answers("amc23.jsonl") == [("27",), ("36",), ("45",), ("3159",)]
    assert answers("minerva_math.jsonl")[0] == ("1.6",)
