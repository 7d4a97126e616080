import pytest

from rlmath.config.schema import DataConfig
from rlmath.data import load_tokenizer
from rlmath.data.files import MalformedRowError
from rlmath.data.prompts import Encoder, PromptRenderer
from rlmath.errors import UserError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def render(value, tokenizer, **settings):
    return PromptRenderer(DataConfig(**settings), tokenizer).render(value, {})


def test_a_template_may_have_braces_of_its_own(tokenizer):
    template = "{prompt} Put the answer in \\boxed{}. {prompt_again}"
    expected = "1+{prompt}? Put the answer in \\boxed{}. {prompt_again}"
    assert render("1+{prompt}?", tokenizer, prompt_template=template) == expected


def test_a_chat_is_rendered_and_its_question_put_in_the_template(tokenizer):
    settings = {"apply_chat_template": True}
    assert render(CHAT, tokenizer, **settings) == "<|system|>Be brief.<|user|>1+1?<|assistant|>"
    text = render(CHAT, tokenizer, prompt_template="Q: {prompt}", **settings)
    assert text == "<|system|>Be brief.<|user|>Q: 1+1?<|assistant|>"


def test_the_systems_prompt_takes_the_place_of_the_rows(tokenizer):
    text = render(CHAT, tokenizer, apply_chat_template=True, system_prompt="Think.")
    assert text == "<|system|>Think.<|user|>1+1?<|assistant|>"
    assert CHAT[0]["content"] == "Be brief."


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "this is null"),
        (3, "this is a int"),
        ("  ", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([{"role": "user"}], "a chat message is"),
        (["hi"], "a chat message is"),
        ([*CHAT, {"role": "assistant", "content": "2"}], "the last chat message is by 'assistant'"),
    ],
)
def test_invalid_prompts_are_malformed(tokenizer, value, message):
    with pytest.raises(MalformedRowError, match=message):
        render(value, tokenizer, apply_chat_template=True)


def test_a_chat_without_the_setting_names_the_setting(tokenizer):
    with pytest.raises(MalformedRowError, match=r"data\.apply_chat_template=true"):
        render(CHAT, tokenizer)


def test_prompts_refused_by_the_chat_template_are_malformed(bos_tokenizer):
    template = bos_tokenizer.chat_template
    try:
        bos_tokenizer.chat_template = (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
            "{% endif %}{{ messages[0].content }}"
        )
        with pytest.raises(MalformedRowError, match=r"\(system, user\): no system role"):
            render(CHAT, bos_tokenizer, apply_chat_template=True)
        bos_tokenizer.chat_template = None
        with pytest.raises(UserError, match="no chat template"):
            render(CHAT, bos_tokenizer, apply_chat_template=True)
    finally:
        bos_tokenizer.chat_template = template


def test_first_tokens_are_added_once_and_last_ones_never(bos_tokenizer):
    bos, eos = bos_tokenizer.bos_token_id, bos_tokenizer.eos_token_id
    assert bos_tokenizer("12").input_ids == [bos, 16, 17, eos]
    encoder = Encoder(bos_tokenizer)
    assert encoder.first_tokens == (bos,)
    expected = [(bos, 16, 17)] * 2
    assert encoder.encode(["12", f"{bos_tokenizer.bos_token}12"], True) == expected
    assert encoder.encode(["12"], False) == [(16, 17)]


def test_a_chat_template_is_the_only_one_to_write_first_tokens(bos_tokenizer):
    text = render(CHAT[1:], bos_tokenizer, apply_chat_template=True)
    (tokens,) = Encoder(bos_tokenizer).encode([text], add_first_tokens=False)
    assert list(tokens) == bos_tokenizer.apply_chat_template(
        CHAT[1:], add_generation_prompt=True, return_dict=False
    )
    assert tokens.count(bos_tokenizer.bos_token_id) == 1


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
