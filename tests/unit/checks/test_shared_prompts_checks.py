"""``actor.share_prompts``: where it is refused, and where ``auto`` means never."""

import dataclasses

import pytest
from config_cases import CPU_MACHINE, GPU_MACHINE, QWEN_1_5B, write_model_folder

from rlmath.checks.run import find_problems
from rlmath.checks.shared_prompts import share_prompts
from rlmath.config.actor import SharePrompts
from rlmath.config.arithmetic import resolve_layout
from rlmath.config.load import load
from rlmath.config.schema import Config, Device
from rlmath.config.shared_prompts import shares_prompts
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from rlmath.training.rank_settings import actor_settings

DENSE = model_spec(QWEN_1_5B)
MOE = dataclasses.replace(DENSE, experts=8)
LATENT = dataclasses.replace(model_spec(KNOWN["DeepSeek-V3"]), experts=0)
CASES = [
    (DENSE, Device.cpu, 1, None),
    (DENSE, Device.cuda, 1, "cluster.device is cuda"),
    (DENSE, Device.cpu, 2, "actor.context_parallel=2"),
    (MOE, Device.cpu, 1, "MoE"),
    (LATENT, Device.cpu, 1, "latent attention"),
]


@pytest.mark.parametrize(("model", "device", "context_parallel", "part"), CASES)
def test_always_is_refused_where_auto_is_never(model, device, context_parallel, part):
    config = Config()
    config.actor.context_parallel = context_parallel

    def problems(chosen, command="train"):
        config.actor.share_prompts = chosen
        return list(share_prompts(config, model, device, command))

    messages = problems(SharePrompts.always)
    assert len(messages) == (part is not None)
    for message in messages:
        assert message.startswith("actor.share_prompts=always: ") and str(part) in message
    assert problems(SharePrompts.always, "sft") == messages
    assert not problems(SharePrompts.always, "evaluate")
    assert not problems(SharePrompts.auto) and not problems(SharePrompts.never)
    for chosen, expected in ((SharePrompts.auto, part is None), (SharePrompts.never, False)):
        assert shares_prompts(chosen, model, device.value, context_parallel) is expected


def test_the_command_refuses_it_once_also_where_the_model_is_not_known(tmp_path):
    given = [f"model.path={tmp_path / 'none'}", f"runner.run_dir={tmp_path}/run", "cluster=gpu8"]
    config = load([*given, "actor.share_prompts=always"])
    found = [one for one in find_problems(config, "train", GPU_MACHINE) if "share_prompts" in one]
    assert len(found) == 1 and "cuda" in found[0]
    config.cluster.device = Device.cpu
    assert not [one for one in find_problems(config, "train", CPU_MACHINE) if "share_" in one]


@pytest.mark.parametrize("chosen", list(SharePrompts))
def test_ranks_get_the_share_prompts_setting(chosen, tmp_path):
    folder = write_model_folder(tmp_path / "model", QWEN_1_5B)
    given = [f"model.path={folder}", f"runner.run_dir={tmp_path}", "cluster.device=cpu"]
    config = load([*given, "data.train_paths=[x]", f"actor.share_prompts={chosen.value}"])
    layout = resolve_layout(config, Device.cpu)
    settings = actor_settings(config, layout, config.actor.optimizer, 1, 1.0)
    assert settings.share_prompts is (chosen is not SharePrompts.never)
