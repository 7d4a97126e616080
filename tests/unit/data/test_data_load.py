import pytest

from rlmath.config.schema import DataConfig, OverlongPrompt
from rlmath.data import load_examples, load_problems
from rlmath.errors import UserError


def row(prompt="1+1?", answer="\\boxed{2}", **others):
    return {"prompt": prompt, "solutions": [answer], **others}


def test_the_default_form_needs_no_settings(write_jsonl, tokenizer):
    path = write_jsonl([row("<|user|>1+1?<|assistant|>", level=3, tags=["sum"])])
    (problem,), report = load_problems([path], DataConfig(), tokenizer)
    assert problem.id == "rows.jsonl:1"
    assert problem.prompt == "<|user|>1+1?<|assistant|>"
    assert problem.prompt_token_ids == tuple(tokenizer(problem.prompt).input_ids)
    assert problem.prompt_token_ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert problem.answers == ("2",)
    assert problem.columns == {
        "prompt": "<|user|>1+1?<|assistant|>",
        "solutions": ["\\boxed{2}"],
        "level": 3,
        "tags": ["sum"],
    }, "the whole row: a reward written for TRL takes its answer from there"
    assert (report.rows, report.kept, report.longest_prompt_tokens) == (1, 1, 6)


MALFORMED = [
    ('{"prompt": "a"', "not a JSON object"),
    (
        {"prompt": "a", "solution": "2"},
        r"no field 'solutions' \(data.answer_key\); its fields are ",
    ),
    ({"Prompt": "a", "solutions": ["2"]}, "did you mean data.prompt_key=Prompt?"),
    ({"prompt": None, "solutions": ["2"]}, "field 'prompt': .* this is null"),
    ({"prompt": "a", "solutions": [None]}, "field 'solutions': .* this is null"),
    ({"prompt": "a", "solutions": ["\\boxed{}"]}, "field 'solutions': no answer in"),
    ({"prompt": "\ud83d", "solutions": ["2"]}, "field 'prompt': half of a surrogate pair"),
    ({"prompt": "a", "solutions": ["2", "\udc00"]}, "field 'solutions': half of a surrogate"),
    ([1], "a row is an object with fields, this is a list"),
]


@pytest.mark.parametrize(("bad", "message"), MALFORMED)
def test_a_malformed_row_stops_with_file_line_and_field(write_jsonl, tokenizer, bad, message):
    path = write_jsonl([row(), bad, row()])
    with pytest.raises(UserError, match=f"^rows.jsonl:2: .*{message}") as caught:
        load_problems([path], DataConfig(), tokenizer)
    assert "data.malformed_rows=skip" in str(caught.value)


def test_duplicates_are_kept_and_counted(write_jsonl, tokenizer):
    path = write_jsonl([row("a"), row("b"), row("a"), row("a", "3"), row("b")])
    problems, report = load_problems([path], DataConfig(), tokenizer)
    assert len(problems) == 5
    assert (report.duplicates, report.contradictions) == (3, 1)
    assert "3 duplicate prompts, 1 of them with different answers" in (report.describe(1024))


def test_a_limit_keeps_the_first(write_jsonl, tokenizer):
    path = write_jsonl([row("x" * length) for length in (1, 99, 2, 3, 4)])
    problems, report = load_problems([path], DataConfig(max_prompt_tokens=50), tokenizer, limit=2)
    assert [problem.prompt for problem in problems] == ["x", "xx"]
    assert (report.kept, report.filtered, report.beyond_limit) == (2, 1, 2)
    assert report.rows == report.kept + report.filtered + report.skipped + report.beyond_limit


def test_answers_that_cannot_be_compared_are_reported_with_their_row(write_jsonl, tokenizer):
    path = write_jsonl([row(), row("b", "\\frac{1}{"), row("c", "7")])
    problems, report = load_problems([path], DataConfig(), tokenizer)
    assert len(problems) == 3
    assert report.golds.num_bad == 1
    assert report.golds.bad == ("rows.jsonl:2: '\\\\frac{1}{': a { is never closed",)
    assert "1 with an answer that no response can match" in report.describe(1024)


def test_text_prompts_begin_as_the_tokenizer_wants_and_chats_as_the_template_does(
    write_jsonl, bos_tokenizer
):
    path = write_jsonl([row("12"), row("<|system|>12")])
    problems, _ = load_problems([path], DataConfig(), bos_tokenizer)
    bos = bos_tokenizer.bos_token_id
    assert [problem.prompt_token_ids for problem in problems] == [(bos, 16, 17)] * 2
    path = write_jsonl([row("12")])
    (problem,), _ = load_problems([path], DataConfig(apply_chat_template=True), bos_tokenizer)
    assert problem.prompt_token_ids.count(bos) == 1


def test_examples_end_with_one_end_of_sequence_token(write_jsonl, tokenizer):
    path = write_jsonl(
        [{"prompt": "1+1?", "response": "2"}, {"prompt": "1+2?", "response": "3<|endoftext|>"}]
    )
    examples, report = load_examples([path], DataConfig(), "response", tokenizer)
    end = tokenizer.eos_token_id
    assert [example.response_token_ids for example in examples] == [(17, end), (18, end)]
    assert examples[0].prompt_token_ids == tuple(tokenizer("1+1?").input_ids)
    assert [example.id for example in examples] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert report.kept == 2


@pytest.mark.parametrize("response", [None, "", 3])
def test_an_example_without_a_response_is_malformed(write_jsonl, tokenizer, response):
    path = write_jsonl([{"prompt": "1+1?", "response": response}])
    with pytest.raises(UserError, match=r"^rows.jsonl:1: field 'response': a response is a text"):
        load_examples([path], DataConfig(), "response", tokenizer)
    with pytest.raises(UserError, match=r"sft\.response_key"):
        load_examples([path], DataConfig(), "answer", tokenizer)


def test_worked_examples_longer_than_the_model_follow_the_rule_of_long_prompts(
    write_jsonl, tokenizer
):
    long, short = ({"prompt": "1+1?", "response": "1 " * count} for count in (40, 4))
    settings = DataConfig()
    with pytest.raises(UserError, match=r"4 prompt \+ 81 response = 85 tokens, .* 64 positions"):
        load_examples([write_jsonl([long, long])], settings, "response", tokenizer, 64)
    examples, report = load_examples(
        [write_jsonl([long, short])], settings, "response", tokenizer, 64
    )
    assert [len(one) for one in examples] == [13]
    assert (report.overlong, report.longest_tokens, report.kept) == (1, 85, 1)
    assert "longest example 85 tokens" in report.describe(99)
    assert "4 prompt + 81 response" in report.warnings[-1]
    stop = DataConfig(overlong_prompts=OverlongPrompt.stop)
    with pytest.raises(UserError, match="1 of 2 worked examples are too long"):
        load_examples([write_jsonl([long, short])], stop, "response", tokenizer, 64)
