import json

import pytest

from rlmath.config.schema import DataConfig, MalformedRow
from rlmath.data import load_problems
from rlmath.data.fields import field_of, has_field, no_such_field
from rlmath.errors import UserError

VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 47 + 38?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": '["85"]'},
    "extra_info": {"index": 0, "split": "train", "question": "What is 47 + 38?"},
}


def test_a_dotted_name_leads_into_nested_fields_unless_a_field_has_that_name():
    row = {"a": {"b": {"c": 1}}, "a.b": 2}
    assert field_of(row, "a.b.c") == 1 and field_of(row, "a.b") == 2
    assert not has_field(row, "a.x") and not has_field(row, "a.b.c.d") and not has_field({}, "a")


@pytest.mark.parametrize(
    ("setting", "key", "meant"),
    [
        ("data.answer_key", "answer", "reward_model.ground_truth"),
        ("data.answer_key", "ground_truth", "reward_model.ground_truth"),
        ("data.prompt_key", "question", "extra_info.question"),
    ],
)
def test_hints_look_one_level_down(setting, key, meant):
    assert no_such_field(VERL, setting, key).endswith(f"did you mean {setting}={meant}?")


@pytest.mark.parametrize("prompt_key", ["prompt", "extra_info.question"])
def test_published_nested_rows_load(write_jsonl, tokenizer, prompt_key):
    settings = DataConfig(
        prompt_key=prompt_key, answer_key="reward_model.ground_truth", apply_chat_template=True
    )
    ((problem,), _) = load_problems([write_jsonl([VERL])], settings, tokenizer)
    assert problem.answers == ("85",) and problem.columns["data_source"] == "math_dapo"
    assert problem.prompt == "<|user|>What is 47 + 38?<|assistant|>"


def test_an_answer_with_fields_is_refused_with_their_names(write_jsonl, tokenizer):
    settings = DataConfig(prompt_key="ability", answer_key="reward_model")
    with pytest.raises(UserError, match=r"reward_model\.style, reward_model\.ground_truth"):
        load_problems([write_jsonl([VERL])], settings, tokenizer)


@pytest.mark.parametrize(
    "media",
    [{"images": ["a.png"]}, {"picture": {"bytes": "iVBO", "path": None}}, {"image": "a.png"}],
)
def test_image_columns_are_refused(write_jsonl, tokenizer, media):
    row = {"prompt": "1+1", "solutions": ["2"]}
    with pytest.raises(UserError, match=f"field '{next(iter(media))}' holds an image"):
        load_problems([write_jsonl([row | media])], DataConfig(), tokenizer)
    settings = DataConfig(malformed_rows=MalformedRow.skip)
    problems, report = load_problems(
        [write_jsonl([row | media, row | {"images": []}])], settings, tokenizer
    )
    assert len(problems) == 1 and report.skipped == 1


def test_lost_backslashes_are_restored_and_counted(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    lines = [
        r'{"prompt": "Half of \frac{2}{3}?\nA line\tand a tab", "solutions": ["\frac{1}{3}"]}',
        r'{"prompt": "2 \times 3?", "solutions": ["\boxed{6}"]}',
        json.dumps({"prompt": r"\frac12", "solutions": [r"\text{ok}"]}),
    ]
    path.write_text("\n".join(lines))
    problems, report = load_problems([path], DataConfig(), tokenizer)
    assert problems[0].prompt == "Half of \\frac{2}{3}?\nA line\tand a tab"
    assert [one.answers[0] for one in problems] == [r"\frac{1}{3}", "6", r"\text{ok}"]
    assert problems[1].prompt == r"2 \times 3?"
    assert report.restored == 2 and "2 with control characters" in report.describe(99)
