"""Real tokenizers: the quickstart's, and one of the kind that begins every text with a token."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from rlmath.model.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(2048)


@pytest.fixture(scope="session")
def bos_tokenizer():
    """Puts ``<|system|>`` first and ``<|endoftext|>`` last, as Llama and T5 do with theirs."""
    plain = build_tokenizer(2048)
    backend = plain.backend_tokenizer
    bos, eos = "<|system|>", "<|endoftext|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        special_tokens=[
            (bos, plain.convert_tokens_to_ids(bos)),
            (eos, plain.convert_tokens_to_ids(eos)),
        ],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        chat_template="{{ bos_token }}" + CHAT_TEMPLATE,
    )


@pytest.fixture
def write_jsonl(tmp_path):
    """Writes rows (objects, or raw lines) to a file and gives its path."""

    def write(rows, name="rows.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def real_data():
    """The folder of real problems; see docs/data.md."""
    folder = Path(os.environ.get("RLMATH_DATA_DIR", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"needs published problems, which rlmath does not ship, in RLMATH_DATA_DIR={folder}"
        )
    return folder
