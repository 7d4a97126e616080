"""Every file of conf/ resolves; every experiment passes the checks and shows its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from config_cases import CPU_MACHINE, QWEN_1_5B, QWEN_7B

from rlmath.checks.run import check
from rlmath.config.arithmetic import batch_of, describe, resolve_layout
from rlmath.config.groups import CONF_DIR, options
from rlmath.config.load import load
from rlmath.config.schema import Config, Device, DType, OldLogProbs, Recompute, Schedule

GROUPS = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir())
RECIPES = {
    "qwen2.5-1.5b-grpo-megatron": QWEN_1_5B,
    "qwen2.5-7b-grpo-megatron": QWEN_7B,
    # On a CPU as well: any model whose sequences are long enough.
    "speed_trl_async": {**QWEN_1_5B, "num_hidden_layers": 2, "vocab_size": 1024},
}


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_resolves(group: str) -> None:
    names = options(group)
    assert names
    for name in names:
        load([f"{group}={name}", "model.path=m", "runner.run_dir=r"])


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_passes_the_checks(
    name: str,
    tmp_path: Path,
    make_model: Callable[..., Path],
    make_data: Callable[..., Path],
) -> None:
    """With a model's folder and a data file in place of those that the experiment names."""
    row = {"prompt": "1+1", "solutions": ["2"], "question": "1+1", "answer": "#### 2"}
    overrides = [f"experiment={name}", f"data.train_paths=[{make_data(row)}]"]
    overrides += ["data.eval_paths=[]", "eval.benchmarks=[]", f"runner.run_dir={tmp_path / 'run'}"]
    tiny = "tiny" if name not in RECIPES else make_model(RECIPES[name])
    config = load([*overrides, f"model.path={tiny}"])
    check(config, "train", CPU_MACHINE)
    device = CPU_MACHINE.device(config.cluster.device)
    layout = resolve_layout(config, device)
    batch = batch_of(config, layout)
    text = describe(config, layout)
    assert batch.divides()
    assert f"= {batch.sequences:,} sequences a step" in text
    assert f"= {batch.sequences_per_rank:,} sequences a rank" in text


def test_the_published_recipe_of_the_1_5b() -> None:
    config = load(["experiment=qwen2.5-1.5b-grpo-megatron"])
    assert_shared_recipe(config)
    assert "DeepSeek-R1-Distill-Qwen-1.5B" in config.model.path
    assert config.algorithm.group_size == 16
    # Micro-batches of one sequence make the source's token-mean this.
    assert config.algorithm.aggregation == "seq_mean_token_mean"
    assert config.algorithm.old_log_probs is OldLogProbs.recompute
    assert config.actor.optimizer.clip_grad_norm == 0.8
    assert config.actor.tensor_parallel == 2
    assert config.rollout.tensor_parallel == 1
    layout = resolve_layout(config, Device.cuda)
    assert (layout.actor.data_parallel, layout.engines) == (64, 128)
    assert batch_of(config, layout).sequences == 8192
    assert batch_of(config, layout).sequences_per_rank == 32


def test_the_published_recipe_of_the_7b() -> None:
    config = load(["experiment=qwen2.5-7b-grpo-megatron"])
    assert_shared_recipe(config)
    assert "DeepSeek-R1-Distill-Qwen-7B" in config.model.path
    assert config.algorithm.group_size == 32
    assert config.algorithm.aggregation == "token_mean"
    assert config.algorithm.old_log_probs is OldLogProbs.engine
    assert config.actor.optimizer.clip_grad_norm == 1.0
    assert config.actor.tensor_parallel == 4
    assert config.rollout.tensor_parallel == 2
    layout = resolve_layout(config, Device.cuda)
    assert (layout.actor.data_parallel, layout.engines) == (32, 64)
    assert batch_of(config, layout).sequences == 16384
    assert batch_of(config, layout).sequences_per_rank == 128


def assert_shared_recipe(config: Config) -> None:
    algorithm, actor, optimizer = config.algorithm, config.actor, config.actor.optimizer
    assert config.model.dtype is DType.bfloat16
    assert (config.data.prompt_key, config.data.answer_key) == ("prompt", "solutions")
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 27648)
    assert (algorithm.prompts_per_step, algorithm.minibatches_per_step) == (512, 4)
    assert (algorithm.advantage, algorithm.loss) == ("grpo", "ppo_clip")
    # Beyond the group's z-score, over all response tokens of the step.
    assert algorithm.whiten_tokens
    assert algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert (algorithm.kl_coef, algorithm.early_stop_ratio) == (0.0, 5.0)
    assert (optimizer.lr, optimizer.schedule) == (2e-5, Schedule.constant)
    assert (optimizer.warmup_steps, optimizer.weight_decay) == (0, 0.05)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-5)
    assert (actor.sequence_parallel, actor.distributed_optimizer) == (True, True)
    # The published one recomputes 20 layers; the plan fits without, tests/unit/commands/plan.
    assert (actor.recompute, actor.recompute_num_layers) == (Recompute.none, None)
    assert config.rollout.temperature == 1.0
    assert (config.reward.correct, config.reward.incorrect) == (5.0, -5.0)
    assert (config.cluster.nodes, config.cluster.gpus_per_node) == (16, 8)
