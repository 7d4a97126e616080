"""Every public configuration becomes an experiment that ``--check`` accepts."""

import json

import pytest
import yaml

from rlmath.checks.machine import Machine
from rlmath.checks.run import find_problems
from rlmath.commands.importing.cli import FRAMEWORKS, fill_in
from rlmath.commands.importing.fact import translate
from rlmath.config.experiment_file import write_experiment
from rlmath.config.load import with_values
from tests.unit.checks.config_cases import write_model_folder
from tests.unit.commands.importing.cases import cases

pytestmark = pytest.mark.process

# As large as the largest layouts need.
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "head_dim": 64,
    "max_position_embeddings": 1 << 20,
    "num_attention_heads": 64,
    "num_hidden_layers": 96,
    "num_key_value_heads": 64,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
# For configurations that shard experts or replay routes.
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 2048,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
}
# Their mistakes, or ours to refuse: each is named.
REFUSED = (
    "compares the samples of a problem with each other",  # one sample of a problem
    "GPUs are needed, each on one node",  # an engine over several nodes
    "an MoE needs whole sequences",
    "actor.expert_parallel=",  # experts over the ranks of the pipeline too
    "has no out_proj",  # a matrix of LFM2, and here of models with linear attention
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("imported")
    write_model_folder(made / "dense", DENSE)
    write_model_folder(made / "moe", MOE)
    chat = [{"role": "user", "content": "1+1, in \\boxed{}"}]
    row = {"prompt": chat, "solution": "2", "reward_model": {"ground_truth": "2"}}
    row |= dict.fromkeys(("problem", "problem_statement", "question", "input"), "1+1")
    row |= dict.fromkeys(("label", "answer", "expected_answer", "solutions"), "2")
    row["context_messages"] = chat
    (made / "train.jsonl").write_text(json.dumps(row) + "\n")
    return made


@pytest.mark.parametrize(("name", "case"), cases())
def test_public_configuration_passes_the_checks(name, case, folder, request):
    found = translate(FRAMEWORKS[name], case["given"])
    fill_in(found, "one")
    written = write_experiment(folder, request.node.callspec.id, found.settings, "one")
    experts = found.settings.get("actor.expert_parallel", 1) > 1
    model = "moe" if experts or "actor.routing_replay" in found.settings else "dense"
    here = [
        f"data.train_paths=[{folder / 'train.jsonl'}]",
        "data.eval_paths=[]",
        "eval.every=0",
        "runner.trackers=[tensorboard]",
        f"runner.run_dir={folder / 'run'}",
        "runner.resume=auto",
        f"model.path={folder / model}",
        "reward.items=[{name: math}]",
    ]
    config = with_values(yaml.safe_load(written.read_text()), here)
    gpus = config.cluster.gpus_per_node
    machine = Machine(gpus=gpus, torch_build="2.13.0", memory_bytes=2**42, disk_bytes=2**50)
    problems = list(find_problems(config, "train", machine))
    assert [one for one in problems if not any(part in one for part in REFUSED)] == []
