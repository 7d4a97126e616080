import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmath.checks.machine import Machine
from rlmath.cli import main
from rlmath.commands.replay.choices import check_ranks, other_config, read_choices, run_config
from rlmath.config.algorithm import AlgorithmConfig, KlPlace, ReferenceConfig
from rlmath.config.load import load, to_plain
from rlmath.config.schema import Device
from rlmath.errors import ConfigError
from rlmath.model.parallel import Layout
from rlmath.model.tiny import make_tiny_model
from tests.support.case_files import on_cases

CPU = Machine(gpus=0, torch_build="2.0+cpu", memory_bytes=2**40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=0)
    return folder


def source(model, *overrides, step=5, device="cpu"):
    given = ["experiment=quickstart", f"model.path={model}", "runner.run_dir=r", *overrides]
    settings = to_plain(load(given))
    actor = settings["actor"]
    layout = Layout(actor["tensor_parallel"], actor["pipeline_parallel"], 2)
    made = {**dataclasses.asdict(layout), "device": device, "threads": 3}
    return SimpleNamespace(
        step=step,
        run=SimpleNamespace(folder=Path("r"), settings_of=lambda _: settings),
        headers={step: {"layout": made, "keys": ["a/0"] * 8}},
    )


def both(model, *overrides, given=(), **kwargs):
    made, choices = source(model, *given, **kwargs), read_choices(overrides)
    config = run_config(made, made.step, choices, Path("f"))
    return config, other_config(made, config, choices)


@on_cases("setting, why", __file__, "replay_refused")
def test_replay_refuses_settings(setting, why):
    with pytest.raises(ConfigError, match=r"(?s)" + why) as error:
        choices = read_choices([setting])
        made = source(Path("none"))
        run_config(made, made.step, choices, Path("f"))
    assert setting.split("=")[0].split(".")[-1] in str(error.value)


def test_replay_names_all_errors_at_once():
    with pytest.raises(ConfigError, match="2 errors"):
        read_choices(["data.seed=1", "actor.tensor_parallel=1", "nonsense=2"])


def test_replay_distinguishes_choices_from_layouts():
    given = ["actor.tensor_parallel=1", "correction.kind=token_mask", "loss_options.clip_high=0.3"]
    choices = read_choices(given)
    assert choices.layout_keys == {"actor.tensor_parallel"}
    assert choices.update_keys == {"algorithm.correction.kind", "algorithm.loss_options.clip_high"}


def test_a_teacher_is_in_the_batch_or_nowhere(model):
    """A replay starts none: the run's log-probs of it are kept."""
    given = ("algorithm.distill_coef=1", "teacher.path=gone", "teacher.engines=2")
    config, other = both(model, "algorithm.distill_clip=1", given=given)
    assert config.teacher.path is None and config.algorithm.distill_coef == 1
    assert other.algorithm.distill_clip == 1
    config, other = both(model, "algorithm.distill_coef=0", given=given)
    assert other.algorithm.distill_coef == 0
    with pytest.raises(ConfigError, match=r"distill_coef=1: needs a teacher's log-probs"):
        both(model, "algorithm.distill_coef=1")
    with pytest.raises(ConfigError, match=r"advantage=teacher: .* leaves nothing to learn"):
        both(model, "algorithm.advantage=teacher", "algorithm.distill_coef=0", given=given)


def test_another_loss_has_its_own_options(model):
    """Options of the run's loss are not left to the other; unused settings are as by default."""
    config, other = both(
        model,
        *("algorithm.loss=cispo", "correction.kind=none"),
        given=("algorithm.loss_options.clip_low=0.1", "algorithm.correction.kind=token_truncate"),
    )
    assert config.algorithm.loss_options["clip_low"] == 0.1
    assert other.algorithm.loss == "cispo"
    assert (
        other.algorithm.loss_options
        == load(
            ["model.path=tiny", "runner.run_dir=r", "algorithm.loss=cispo"]
        ).algorithm.loss_options
    )
    kl = ("algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1")
    of_kl = ("algorithm.kl_target=0.1", "algorithm.kl_horizon_samples=7")
    reference = ("algorithm.reference.kind=reset", "algorithm.reference.every=3")
    config, other = both(model, "kl_coef=0", given=(*kl, *of_kl, *reference))
    assert (config.algorithm.kl_in, other.algorithm.kl_in) == (KlPlace.reward, KlPlace.loss)
    # Not used by what is not used any more: kl_target's, and those of the reference's kind.
    assert other.algorithm.kl_horizon_samples == AlgorithmConfig().kl_horizon_samples
    assert other.algorithm.reference == ReferenceConfig()


@on_cases("overrides, given, words", __file__, "not_compared")
def test_choices_that_cannot_be_compared(model, overrides, given, words):
    with pytest.raises(ConfigError, match=words):
        both(model, *overrides, given=given)


def test_the_layout_is_the_run_s_unless_another_one_is_given(model):
    made = source(model, "actor.tensor_parallel=2", "actor.sequence_parallel=true")
    config = run_config(made, 5, read_choices([]), Path("f"))
    layout = check_ranks(config, CPU, 8)
    assert (layout.actor.tensor_parallel, layout.actor.data_parallel) == (2, 2)
    assert config.actor.num_threads == 3 and config.actor.sequence_parallel
    config = run_config(made, 5, read_choices(["actor.tensor_parallel=1"]), Path("f"))
    layout = check_ranks(config, CPU, 8)
    assert (layout.actor.world_size, config.actor.num_threads) == (1, None)
    assert not config.actor.sequence_parallel


def test_a_layout_that_cannot_do_it(model):
    made = source(model)

    def refusal(sequences, *overrides):
        config = run_config(made, 5, read_choices(list(overrides)), Path("f"))
        with pytest.raises(ConfigError) as error:
            check_ranks(config, CPU, sequences)
        return str(error.value)

    assert "actor.tensor_parallel=3" in refusal(8, "actor.tensor_parallel=3")
    assert "needs 32" in refusal(8, "actor.data_parallel=16")
    config, other = both(model, "algorithm.minibatches_per_step=5")
    with pytest.raises(ConfigError, match=r"minibatches_per_step=5 x 2 .* needs 10"):
        check_ranks(config, CPU, 8, other)
    made = source(model, device="cuda")
    assert "cluster.device=cpu redoes" in refusal(8)
    config = run_config(made, 5, read_choices(["cluster.device=cpu"]), Path("f"))
    assert config.cluster.device is Device.cpu


def test_the_command_says_it_in_one_line(tmp_path, capsys):
    assert main(["replay", str(tmp_path), "3", "--json", "rollout.temperature=0.1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: rollout.temperature=0.1") and said.count("\n") == 1
    assert main(["replay", str(tmp_path), "0"]) == 2
    assert main(["replay", str(tmp_path), "3"]) == 2
    assert "neither metrics.jsonl nor samples/" in capsys.readouterr().err
