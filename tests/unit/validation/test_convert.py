import json

import pytest

from rlmath.errors import UserError
from rlmath.validation.convert import model_of_run, read_checkpoint


def test_the_model_of_a_run_is_found_from_its_settings(tmp_path):
    model = tmp_path / "model"
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    (checkpoint / "actor").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.yaml above .*model\.path="):
        model_of_run(checkpoint)
    (tmp_path / "run" / "config.yaml").write_text(f"model:\n  path: {model}\n")
    with pytest.raises(
        UserError, match=r"names the model .*, which is not there now.*model\.path="
    ):
        model_of_run(checkpoint)
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert model_of_run(checkpoint) == model
    assert model_of_run(checkpoint / "actor") == model


def test_a_checkpoint_says_what_it_is(tmp_path):
    with pytest.raises(UserError, match=r"is no checkpoint.*runs/<run>/checkpoints/step_000050"):
        read_checkpoint(tmp_path)
    about = {"shape": {"layers": 2}, "dtype": "bfloat16", "layout": {"tensor_parallel": 4}}
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "about.json").write_text(json.dumps(about))
    saved = read_checkpoint(tmp_path)
    assert str(saved.dtype) == "torch.bfloat16"
    assert saved.layout == {"tensor_parallel": 4}
    assert read_checkpoint(tmp_path / "actor") == saved
