"""The tiny model's tokenizer: one token per UTF-8 byte, and chat markers.

Byte-level BPE without merges, so an ASCII character is one token, any other character is as many
tokens as it has bytes, and encoding is lossless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen2Tokenizer

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, SYSTEM, USER, ASSISTANT)
# One token for each byte.
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS]
    return {symbol: index for index, symbol in enumerate(symbols)}


def fast_tokenizer() -> Tokenizer:
    """The encoder of :func:`build_tokenizer`, without transformers."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    made = Tokenizer(models.BPE(vocab=vocabulary(), merges=[]))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return made


def build_tokenizer(max_length_tokens: int) -> Qwen2Tokenizer:
    """A tokenizer of 256 bytes and ``SPECIAL_TOKENS`` that adds no tokens to a text.

    It has the class of a loaded Qwen2 folder, so what is written here is what vLLM and transformers
    load. Like Qwen2's it composes accents first (NFC). ``max_length_tokens``: maximum sequence
    length of its model.
    """
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(
        vocab=vocabulary(),
        merges=[],
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length_tokens,
    )
