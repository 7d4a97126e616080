import hashlib

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlmath.quickstart import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_every_weight(folder):
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 600_000 < sum(parameter.numel() for parameter in model.parameters()) < 700_000
    with torch.no_grad():
        logits = model(torch.arange(12)[None]).logits
    assert logits.shape == (1, 12, 261) and logits.isfinite().all()


def test_sizes_divide_by_tp_2_and_pp_2(folder):
    config = AutoConfig.from_pretrained(folder)
    assert config.vocab_size == 261  # Odd on purpose: tensor parallelism has to pad it.
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers)
    assert not any(size % 2 for size in sizes)
    assert config.max_position_embeddings == 2048
    assert (config.eos_token_id, config.pad_token_id) == (256, 257)


def test_the_seed_decides_every_byte(folder, tmp_path):
    def digests(place):
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in place.iterdir()
        }

    state = torch.random.get_rng_state()
    again = make_tiny_model(tmp_path / "again", seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert digests(again) == digests(folder)
    other = digests(make_tiny_model(tmp_path / "other", seed=4))
    changed = {name for name, digest in digests(folder).items() if other[name] != digest}
    assert changed == {"model.safetensors"}


def test_embeddings_can_be_tied(tmp_path):
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True, num_layers=1)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_sizes_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_heads=3"):
        make_tiny_model(tmp_path, num_heads=3)


def test_an_ascii_character_is_a_token(tokenizer):
    text = "".join(map(chr, range(128)))
    ids = tokenizer(text).input_ids
    assert len(ids) == 128 and max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer("é漢").input_ids == tokenizer("é").input_ids + tokenizer("漢").input_ids
    assert len(tokenizer("漢").input_ids) == 3


def test_markers_are_single_tokens_that_decoding_can_leave_out(tokenizer):
    text = "<|system|>s<|user|>u<|assistant|>a<|endoftext|><|pad|>"
    ids = tokenizer(text).input_ids
    assert len(ids) == 8
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "sua"


def test_the_chat_template_writes_the_markers(tokenizer):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>s<|user|>u<|assistant|>"
    chat.append({"role": "assistant", "content": "a"})
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|system|>s<|user|>u<|assistant|>a<|endoftext|>"
