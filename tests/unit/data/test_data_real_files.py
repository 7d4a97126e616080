"""Real problems: every row of every file is read with the overrides that docs/data.md gives."""

import pytest

from rlmath.config.schema import DataConfig
from rlmath.data import load_problems

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
