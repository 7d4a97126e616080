"""A checkpoint of other models is refused before anything is started."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.config.load import load
from rlmath.data import ProblemStream
from rlmath.errors import UserError
from rlmath.model.tiny import make_tiny_model
from rlmath.training.loop import check_resumed
from rlmath.training.resumed_model import check_resumed_model
from rlmath.types import Problem

RANK_4: dict[str, Any] = {
    "rank": 4,
    "alpha": 32.0,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "layers": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def settings(model, *more):
    return load([f"model.path={model}", "model.dtype=float32", "runner.run_dir=r", *more])


def checkpoint(folder, lora=None, *, has_values=False):
    path = folder / "step_000003"
    for name in ("actor", *(["value_model"] * has_values)):
        (path / name).mkdir(parents=True)
    about = {"dtype": "float32", "lora": lora, "layout": {"tensor_parallel": 8}}
    (path / "actor" / "about.json").write_text(json.dumps(about))
    return path


def test_the_same_models_in_another_layout_pass(model, tmp_path):
    check_resumed_model(settings(model), checkpoint(tmp_path / "a"))
    check_resumed_model(settings(model), checkpoint(tmp_path / "b", has_values=True))
    own = "actor.lora.rank=4"
    check_resumed_model(settings(model, own), checkpoint(tmp_path / "c", RANK_4))
    # A damaged file is the ranks' matter.
    path = checkpoint(tmp_path / "d")
    (path / "actor" / "about.json").write_text("{")
    check_resumed_model(settings(model), path)


@pytest.mark.parametrize(
    "lora, more, said",
    [
        (None, ["model.dtype=bfloat16"], "model.dtype: float32 -> bfloat16. Set"),
        (RANK_4, ["actor.lora.rank=8"], "settings: actor.lora.rank: 4 -> 8. Set"),
        (RANK_4, [], "settings: actor.lora.rank: 4 -> 0. Set"),
        (None, ["actor.lora.rank=4"], "settings: actor.lora.rank: 0 -> 4. Set"),
        (RANK_4, ["actor.lora.rank=4", "actor.lora.alpha=8"], "actor.lora.alpha: 32.0 -> 8.0. Set"),
    ],
)
def test_other_weights_to_train_are_named_by_their_settings(model, tmp_path, lora, more, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        check_resumed_model(settings(model, *more), checkpoint(tmp_path, lora))


def test_other_data_is_refused_before_anything_starts(model, tmp_path):
    problems = [Problem(f"a:{i}", "?", (1,), ("2",)) for i in range(3)]
    place = ProblemStream(problems).state_dict()
    found = SimpleNamespace(path=checkpoint(tmp_path), driver_state={"sampler": {"stream": place}})
    check_resumed(settings(model), ProblemStream(problems), found)
    with pytest.raises(UserError, match=r"was 3 and is 2.*model\.path"):
        check_resumed(settings(model), ProblemStream(problems[:2]), found)


def test_a_value_model_that_is_not_there(model, tmp_path):
    path = checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"advantage=gae: .*step_000003 has no value model"):
        check_resumed_model(settings(model, "algorithm.advantage=gae"), path)
