"""A check of the data refuses what the loader refuses, and nothing that it accepts."""

import datetime
import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from config_cases import CPU_MACHINE

from rlmath.checks.prompt_style import with_prompt_style
from rlmath.checks.run import check
from rlmath.checks.trial import ROWS, trial
from rlmath.config.benchmarks import BOXED, benchmarks_of
from rlmath.config.load import load
from rlmath.config.reward import CompletionFormat
from rlmath.data import load_examples, load_problems
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.prompt_report import too_few
from rlmath.errors import UserError
from rlmath.model.chat import is_instruct
from rlmath.model.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer

GOOD = {"prompt": "What is 1 + 1?", "solutions": "2"}
SKIP = "data.malformed_rows=skip"
CHAT = "data.apply_chat_template=true"


def lines(*rows):
    return b"".join(
        row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows
    )


def answer(value):
    return GOOD | {"solutions": value}


def chat(*roles, content="1 + 1?"):
    return GOOD | {"prompt": [{"role": role, "content": content} for role in roles]}


LATIN_1 = '{"prompt": "Été?", "solutions": "2"}\n'.encode("latin-1")
FILES = {
    "an object": ("r.jsonl", lines(answer({"a": 1})), [], False),
    "a truth value": ("r.jsonl", lines(answer(True)), [], False),
    "empty answers": ("r.jsonl", lines(answer(["", None])), [], False),
    "NaN": ("r.jsonl", lines(answer(float("nan"))), [], False),
    "half a surrogate": ("r.jsonl", lines(answer("\ud835")), [], False),
    "a blank prompt": ("r.jsonl", lines(GOOD | {"prompt": " "}), [], False),
    "an assistant's turn last": ("r.jsonl", lines(chat("user", "assistant")), [CHAT], False),
    "parts": ("r.jsonl", lines(chat("user", content=[{"type": "text"}])), [CHAT], False),
    "a chat": ("r.jsonl", lines(chat("system", "user")), [CHAT], True),
    "a message as text": ("r.jsonl", lines(chat("user")), [], True),
    "a chat as text": (
        "r.jsonl",
        lines(chat("system", "user")),
        ["data.apply_chat_template=false"],
        False,
    ),
    "malformed beyond the first": ("r.jsonl", lines(*[GOOD] * 20, answer(None)), [], False),
    "malformed ones first": ("r.jsonl", lines(*[answer(None)] * 9, *[GOOD] * 50), [SKIP], True),
    "all malformed": ("r.jsonl", lines(*[answer(None)] * 9), [SKIP], False),
    "one byte of Latin-1": ("r.jsonl", lines(*[GOOD] * 5, LATIN_1), [SKIP], True),
    "Latin-1": ("r.jsonl", lines(*[GOOD] * 5, LATIN_1), [], False),
    "a BOM before lines": ("r.jsonl", b"\xef\xbb\xbf" + lines(GOOD), [], True),
    "a BOM before a list": ("r.json", b"\xef\xbb\xbf" + json.dumps([GOOD]).encode(), [], True),
    "two lists": ("r.json", json.dumps({"a": [GOOD], "b": []}).encode(), [], False),
    "too long": (
        "r.jsonl",
        lines(GOOD | {"prompt": "x" * 90}),
        ["data.max_prompt_tokens=8"],
        False,
    ),
    "no row": ("r.jsonl", b"\n", [], False),
}


def accepts(act):
    try:
        act()
    except UserError as error:
        return False, str(error)
    return True, ""


def compare(path, overrides, expected, command="train"):
    """Whether ``--check`` and the loader take the file; the check's message."""
    key = {"train": "data.train_paths", "sft": "sft.train_paths", "evaluate": "data.eval_paths"}
    settings = ["model=tiny", "actor=small", "rollout=small", f"runner.run_dir={path.parent}/r"]
    config = load([*settings, *overrides, f"{key[command]}=[{path}]"])
    tokenizer = LightTokenizer("tiny")
    tokenizer.eos_token_id = 0

    def run():
        if command == "sft":
            load_examples([path], config.data, config.sft.response_key, tokenizer)
        else:
            load_problems([path], config.data, tokenizer)

    def look():
        check(config, command, CPU_MACHINE)
        trial(config, command)

    assert accepts(run)[0] is expected
    taken, message = accepts(look)
    assert taken is expected, message
    return message


@pytest.mark.parametrize("name", FILES)
def test_the_check_agrees_with_the_loader(name, tmp_path):
    file, content, overrides, expected = FILES[name]
    path = tmp_path / file
    path.write_bytes(content)
    message = compare(path, overrides, expected)
    assert expected or file in message or "max_prompt_tokens" in message


@pytest.mark.parametrize("value", [Decimal("2.5"), float("nan")], ids=str)
def test_numbers_of_parquet_that_are_no_answers(value, tmp_path):
    path = tmp_path / "r.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([answer(value)] * 3), path)
    assert "data.answer_key=solutions: " in compare(path, [], False)


def test_responses_and_held_out_problems_are_read_as_well(tmp_path):
    path = tmp_path / "r.jsonl"
    good = {"prompt": "1 + 1?", "response": "2"}
    path.write_bytes(lines(*[good] * 9, good | {"response": 2}))
    assert "r.jsonl:10" in compare(path, [], False, "sft")
    path.write_bytes(lines(*[GOOD] * 9, answer({})))
    assert "r.jsonl:10" in compare(path, [], False, "evaluate")
    compare(path, [SKIP], True, "evaluate")


def test_malformed_rows_that_are_left_out_are_counted(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines(*[answer(None)] * 2, *[GOOD] * 3))
    overrides = ["model=tiny", f"data.train_paths=[{path}]", f"runner.run_dir={tmp_path}/r", SKIP]
    found = trial(load(overrides), "train")
    assert "2 of 5 checked rows are malformed" in found[0] and "r.jsonl:1" in found[0]
    assert "longest of 3 checked prompts" in found[1]
    # Only the first rows of a long file are read: what comes after them may well be usable.
    path.write_bytes(lines(*[answer(None)] * ROWS, GOOD))
    (line,) = trial(load(overrides), "train")
    assert f"{ROWS:,} of {ROWS:,} checked rows" in line


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = "{{ 'Today ' + strftime_now('%d %b %Y') + '. ' }}" + CHAT_TEMPLATE
PLAIN = {"prompt": "What is 47 + 38?", "solutions": ["85"]}
RENDERED = {"prompt": "<|user|>47 + 38?<|assistant|>", "solutions": ["\\boxed{85}"]}


@pytest.fixture
def make_config(tmp_path):
    """Settings with a model's folder that has a tokenizer of this template, and a row of data."""

    def make(*words, template=CHAT_TEMPLATE, row=PLAIN):
        folder = tmp_path / "model"
        tokenizer = build_tokenizer(2048)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        is_instruct.cache_clear()
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        base = [f"model.path={folder}", f"runner.run_dir={tmp_path}/run"]
        return load([*base, f"data.train_paths=[{tmp_path}/rows.jsonl]", *words])

    return make


def decide(config, command="train"):
    data = with_prompt_style(config, command).data
    return data.apply_chat_template, data.prompt_template


def test_an_instruct_model_with_plain_problems_gets_its_template_and_a_request(make_config):
    assert decide(make_config()) == (True, BOXED)


def test_a_base_model_with_the_template_of_its_instruct_version_gets_the_request_alone(make_config):
    assert decide(make_config(template=CHATML)) == (False, BOXED)
    assert decide(make_config(template=None)) == (False, BOXED)


def test_a_template_that_ends_no_turn_is_that_of_an_instruct_model(make_config):
    assert decide(make_config(template=CHATML.replace("<|im_end|>\n", ""))) == (True, BOXED)


def test_a_turn_end_of_the_generation_config_makes_an_instruct_model(make_config, tmp_path):
    config = make_config(template=CHATML.replace("<|im_end|>", "<|pad|>"))
    file = tmp_path / "model" / "generation_config.json"
    assert not is_instruct(config.model.path)
    pad = build_tokenizer(64).convert_tokens_to_ids("<|pad|>")
    file.write_text(json.dumps({"eos_token_id": [0, pad]}))
    is_instruct.cache_clear()
    assert is_instruct(config.model.path)


@pytest.mark.parametrize("marker", ["<|user|>", "<｜User｜>", "[INST] "])
def test_rendered_prompts_stay_as_they_are(make_config, marker):
    row = RENDERED | {"prompt": f"{marker}47 + 38?"}
    assert decide(make_config(row=row)) == (False, "{prompt}")


def test_given_prompt_style_is_unchanged(make_config):
    words = ["data.apply_chat_template=false", "data.prompt_template='Q: {prompt}'"]
    assert decide(make_config(*words)) == (False, "Q: {prompt}")
    twice = make_config("data.apply_chat_template=true", row=RENDERED)
    assert decide(twice)[0] is True


@pytest.mark.parametrize(
    ("words", "row"),
    [
        ([], PLAIN | {"prompt": "47 + 38? Answer in \\boxed{}."}),
        (["reward.fallback=number"], PLAIN),
        (["reward.items=[{name: format}]"], PLAIN),
        (["data.system_prompt='Put the answer in a box.'"], PLAIN),
    ],
)
def test_a_request_is_made_only_where_it_is_missing_and_needed(make_config, words, row):
    assert decide(make_config(*words, row=row)) == (True, "{prompt}")


@pytest.mark.parametrize(
    ("response", "template"), [("so \\boxed{85}", BOXED), ("#### 85", "{prompt}")]
)
def test_worked_examples_ask_for_the_form_that_they_show(make_config, tmp_path, response, template):
    row = PLAIN | {"response": response}
    config = make_config(f"sft.train_paths=[{tmp_path}/rows.jsonl]", row=row)
    assert decide(config, "sft") == (True, template)


def test_messages_of_published_data_need_no_setting_with_either_model(make_config):
    row = {
        "prompt": [{"role": "user", "content": "47 + 38?"}],
        "reward_model": {"ground_truth": "85"},
    }
    for template, begin in ((CHAT_TEMPLATE, "<|user|>47"), (CHATML, "47")):
        config = with_prompt_style(make_config("data=verl", template=template, row=row), "train")
        ((problem,), _) = load_problems(
            config.data.train_paths, config.data, LightTokenizer(config.model.path)
        )
        assert problem.prompt.startswith(begin) and "boxed" in problem.prompt


def test_functions_for_texts_still_get_texts(make_config):
    words = "reward.items=[{name: math}, {name: mine.py:short}]"
    found = with_prompt_style(make_config(words), "train").reward.items
    assert [item.completion_format for item in found] == [None, CompletionFormat.text]
    given = make_config(words, "data.apply_chat_template=true")
    assert with_prompt_style(given, "train").reward.items[1].completion_format is None


def test_published_benchmarks_are_sampled_as_the_model_is_trained(make_config):
    for template, chat in ((CHAT_TEMPLATE, True), (CHATML, False)):
        config = make_config("eval.benchmarks=[{name: aime24}]", template=template)
        assert benchmarks_of(config)[-1].data.apply_chat_template is chat


def test_a_template_with_the_date_has_it_fixed_and_settable(make_config):
    config = with_prompt_style(make_config(template=DATED), "train")
    assert config.data.template_date == datetime.date.today().isoformat()
    config = with_prompt_style(
        make_config("data.template_date=2024-07-26", template=DATED), "train"
    )
    for tokenizer in (LightTokenizer(config.model.path), _transformers(config.model.path)):
        ((problem,), _) = load_problems(config.data.train_paths, config.data, tokenizer)
        assert problem.prompt.startswith("Today 26 Jul 2024. <|user|>")
    assert with_prompt_style(make_config(), "train").data.template_date is None


def _transformers(path):
    from rlmath.data import load_tokenizer

    return load_tokenizer(path)


def warnings_of(config, *, needs_box=True):
    tokenizer = LightTokenizer(config.model.path)
    _, report = load_problems(config.data.train_paths, config.data, tokenizer, needs_box=needs_box)
    return list(report.warnings)


def test_bare_prompts_of_an_instruct_model_are_warned_of(make_config):
    bare = ["data.apply_chat_template=false", "data.prompt_template='{prompt}'"]
    chat, box = warnings_of(make_config(*bare))
    assert "chat template is not applied" in chat
    assert "1 of 1 prompts do not ask for \\boxed{}" in box
    (box,) = warnings_of(make_config(*bare, template=CHATML))
    assert "boxed" in box
    assert not warnings_of(make_config(*bare, template=CHATML), needs_box=False)
    assert not warnings_of(with_prompt_style(make_config(), "train"))


def test_a_template_applied_twice_is_warned_of(make_config):
    config = with_prompt_style(make_config("data.apply_chat_template=true", row=RENDERED), "train")
    assert "applied twice" in warnings_of(config, needs_box=False)[0]


def test_markers_of_another_model_are_warned_of(make_config):
    config = with_prompt_style(make_config(row=RENDERED | {"prompt": "<｜User｜>1?"}), "train")
    assert "<｜User｜>, which is no token of this model" in warnings_of(config, needs_box=False)[0]


def test_a_doubled_first_token_is_warned_of(make_config):
    template = "{{ '<|system|>' }}" + CHAT_TEMPLATE
    config = make_config("data.apply_chat_template=true", template="{{ '<|system|>' }}" + template)
    assert any("twice" in text for text in warnings_of(config, needs_box=False))


def test_fewer_problems_than_a_step_are_warned_of_with_the_arithmetic():
    (line,) = too_few("problems", 3, "algorithm.prompts_per_step", 32)
    assert "3 problems for algorithm.prompts_per_step=32: each is in a step 10 or 11 times" in line
    assert too_few("problems", 32, "algorithm.prompts_per_step", 32) == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r'"{prompt}\nPut it in \\boxed{}."', "{prompt}\nPut it in \\boxed{}."),
        (r"'{prompt}\nPut it in \boxed{}.'", "{prompt}\nPut it in \\boxed{}."),
        (r"'{prompt} \\neq'", r"{prompt} \neq"),
        (r"'{prompt} \text{x}'", r"{prompt} \text{x}"),
    ],
)
def test_escapes_in_a_typed_template_are_what_they_say(typed, meant):
    base = ["model=tiny", "runner.run_dir=r"]
    assert load([*base, f"data.prompt_template={typed}"]).data.prompt_template == meant
    config = load([*base, f"eval.benchmarks=[{{name: a, path: b, prompt_template: {typed}}}]"])
    assert config.eval.benchmarks[0].prompt_template == meant
