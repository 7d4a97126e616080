"""One grader for the whole folder, the case files, and the folder of real problems."""

import json
import os
from pathlib import Path

import pytest

from rlmath.grading import MathGrader

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


@pytest.fixture(scope="session")
def grader():
    with MathGrader(num_workers=2) as shared:
        yield shared


@pytest.fixture(scope="session")
def data_dir():
    folder = Path(os.environ.get("RLMATH_DATA_DIR", REPOSITORY / ".." / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"needs published answers, which rlmath does not ship, in RLMATH_DATA_DIR={folder}"
        )
    return folder


@pytest.fixture(scope="session")
def real_answers(data_dir):
    """The accepted answers of every data set, as strings, in order."""
    from rlmath.grading.box import last_box

    def read(name):
        lines = (data_dir / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    answers = {
        name: [row["answer"].split("####")[1].strip() for row in read(name)]
        for name in ("gsm8k_train", "gsm8k_test")
    }
    answers |= {
        name: [str(row["answer"]) for row in read(name)] for name in ("aime24", "amc23", "asdiv")
    }
    answers["minerva_math"] = [last_box(row["solution"]) or "" for row in read("minerva_math")]
    answers["olympiadbench"] = [row["final_answer"][0] for row in read("olympiadbench")]
    answers["svamp"] = [str(row["Answer"]) for row in read("svamp")]
    answers["mawps"] = [str(row["target"]) for row in read("mawps")]
    return answers
