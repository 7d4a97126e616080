"""Each setting that cannot work is refused by name, with figures and with what would work."""

import dataclasses
import json
import os
import subprocess

import pytest
from config_cases import CPU_MACHINE, GPU_MACHINE, QWEN_1_5B, QWEN_7B

from rlmath.checks.machine import Machine
from rlmath.checks.run import check
from rlmath.config.load import load
from rlmath.config.schema import Device
from rlmath.config.settings import by_key
from rlmath.errors import ConfigError
from rlmath.model.published import KNOWN
from tests.support.case_files import on_cases


@pytest.fixture
def base(tmp_path, make_data):
    """Overrides that pass every check."""
    return [
        "model=tiny",
        "actor=small",
        "rollout=small",
        f"data.train_paths=[{make_data()}]",
        f"runner.run_dir={tmp_path / 'run'}",
        "algorithm.prompts_per_step=32",
    ]


@pytest.fixture
def refusal(base):
    """The message for ``base`` with some more overrides."""

    def refuse(*overrides, command="train", machine=CPU_MACHINE):
        with pytest.raises(ConfigError) as caught:
            check(load([*base, *overrides]), command, machine)
        return str(caught.value)

    return refuse


def test_steps_of_an_engine_have_to_be_possible(refusal):
    for on_gpus in ("async_scheduling", "flashinfer"):
        assert f"rollout.{on_gpus}=true" in refusal(f"rollout.{on_gpus}=true")
    message = refusal("cluster=gpu8", "rollout.max_batched_tokens=255", machine=GPU_MACHINE)
    assert "rollout.max_batched_tokens=255: 256 running sequences" in message


def test_settings_that_can_work_pass(base):
    check(load(base), "train", CPU_MACHINE)


def test_a_layout_that_does_not_divide_is_reported_beside_numbers_out_of_range(refusal):
    given = "cluster=gpu8", "actor.context_parallel=3", "rollout.temperature=-1"
    message = refusal(*given, machine=GPU_MACHINE)
    assert "rollout.temperature=-1.0" in message and "context_parallel 3 = 3 GPUs" in message


def test_ranges_hold_at_their_ends():
    share = by_key()["eval.top_p"].limits
    assert [share.holds(x) for x in (0, 1e-9, 1, 1.0001, float("nan"))] == [
        False, True, True, False, False,
    ]  # fmt: skip


@on_cases("overrides, expected", __file__, "impossible_settings")
def test_impossible_settings_are_refused(refusal, overrides, expected):
    message = refusal(*overrides)
    for part in expected:
        assert part in message


def test_sft_asks_for_its_own_files_and_batch(refusal, make_data):
    assert "sft.train_paths is empty" in refusal("data.train_paths=[]", command="sft")
    file = make_data({"prompt": "1+1", "answer": "2"}, name="examples.jsonl")
    message = refusal(f"sft.train_paths=[{file}]", command="sft")
    assert "sft.response_key=response" in message
    assert "its fields are prompt, answer" in message
    file = make_data({"prompt": "1+1", "response": "2"}, name="examples.jsonl")
    message = refusal(f"sft.train_paths=[{file}]", "actor.data_parallel=3", command="sft")
    assert "64 / 3 data-parallel ranks leaves 1; works: 63 or 66" in message


def test_evaluate_asks_for_held_out_files(refusal):
    assert refusal("data.train_paths=[]", command="evaluate").startswith("data.eval_paths is empty")


def test_data_files(refusal, make_data, tmp_path):
    def with_file(path, *more):
        return refusal(f"data.train_paths=[{path}]", *more)

    assert "no such file" in with_file(tmp_path / "none.jsonl")
    assert "is a folder; give the files in it" in with_file(tmp_path)
    assert "end in .jsonl, .json, .csv, .parquet" in with_file(make_data(name="data.txt"))
    assert "no rows" in with_file(make_data(name="empty.jsonl", text="\n"))
    wrong = make_data({"question": "1+1", "answer": "2"}, name="wrong.jsonl")
    assert f"data.prompt_key=prompt: {wrong}:1 has no such field" in with_file(wrong)
    message = with_file(wrong, "data.prompt_key=question", "data.answer_key=answers")
    assert "data.answer_key=answers" in message
    assert "did you mean data.answer_key=answer?" in message
    turns = [{"role": role, "content": "1+1"} for role in ("system", "user")]
    chat = make_data({"prompt": turns, "solutions": ["2"]}, name="chat.jsonl")
    assert "=true" in with_file(chat, "data.apply_chat_template=false")
    none = make_data({"prompt": "1+1", "solutions": []}, name="none.jsonl")
    assert f"data.answer_key=solutions: {none}:1: an empty list" in with_file(none)
    broken = make_data(name="broken.jsonl", text='\n{"prompt": "1", "solutions": ["1"]}\n{"pro\n')
    assert f"{broken}:3: not a JSON object" in with_file(broken)
    late = "".join(f'{{"prompt": "{n}", "solutions": ["1"]}}\n' for n in range(20))
    late = make_data(name="late.jsonl", text=late + '{"prompt": "no answer"}\n')
    message = with_file(late)
    assert f"data.answer_key=solutions: {late}:21 has no such field" in message
    assert message.endswith("data.malformed_rows=skip")
    listed = make_data(name="rows.json", text='{"prompt": 1}')
    assert "a list of rows, or an object with one list" in with_file(listed)
    twice = make_data()
    assert "is given 2 times" in refusal(f"data.train_paths=[{twice},{twice}]")
    parquet = make_data(name="rows.parquet", text="not parquet")
    assert "rows.parquet: not a .parquet file that can be read" in with_file(parquet)
    assert "data.eval_paths" in refusal(f"data.eval_paths=[{tmp_path / 'no.jsonl'}]")


def test_model_folder(refusal, make_model, tmp_path):
    message = refusal("model.path=/nowhere/Qwen3-1.7B")
    assert "model.path=/nowhere/Qwen3-1.7B: no such folder" in message
    assert "hf download Qwen/Qwen3-1.7B" in message
    assert "ORGANIZATION/NAME" in refusal("model.path=/nowhere/mine")
    assert "launchers/quickstart.sh" in refusal(f"model.path={tmp_path}/run/model")
    folder = make_model(QWEN_1_5B)
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    message = refusal(f"model.path={folder}")
    assert "lacks a tokenizer" in message
    assert "lacks weights" in message
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    assert "lacks model-00001-of-00002.safetensors" in refusal(f"model.path={folder}")
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(f"model.path={folder}")
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(f"model.path={folder}")
    rope = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 2048}
    message = refusal(
        f"model.path={make_model(QWEN_1_5B | rope, name='yarn')}",
        "rollout.max_response_tokens=2048",
    )
    assert "has 2048 positions (its yarn reaches 8192: raise max_position_embeddings" in message
    folder = make_model(QWEN_1_5B, name="qwen")
    message = refusal(f"model.path={folder}", "model.architecture=LlamaForCausalLM")
    assert "model.architecture=LlamaForCausalLM" in message
    (folder / "tokenizer_config.json").write_text("{}")
    message = refusal(f"model.path={folder}", "data.apply_chat_template=true")
    assert "has no chat template" in message


def test_heads_that_a_cpu_engine_has_no_attention_for(refusal, make_model):
    model = make_model(QWEN_1_5B | {"head_dim": 48})
    message = refusal(f"model.path={model}")
    assert "its heads are 48 wide" in message and "32, 64, 80, 96" in message


def test_linear_attention_on_a_cpu_machine(refusal, make_model):
    message = refusal(f"model.path={make_model(KNOWN['Qwen3.5-9B'])}", "model.dtype=float32")
    assert "CPU kernels of linear attention compute in bfloat16 only" in message


def test_memory_of_a_cpu_machine(refusal, make_model):
    message = refusal(f"model.path={make_model(QWEN_7B)}", "model.dtype=float32")
    assert "7.6" in message
    assert "1 actor(s) x 8 bytes a parameter" in message
    assert "this machine has 24.0 GiB" in message
    averaged = [
        "model.dtype=bfloat16",
        "algorithm.kl_coef=0.1",
        "algorithm.reference.kind=averaged",
    ]
    message = refusal(f"model.path={make_model(QWEN_7B, name='other')}", *averaged)
    # The average in float32, and the policy's bfloat16 weights while it is in their place.
    assert "1 reference model(s) of algorithm.kl_coef=0.1 x 6 bytes a parameter" in message
    lora = ["model.dtype=float32", "actor.lora.rank=16", "algorithm.kl_coef=0.1"]
    message = refusal(f"model.path={make_model(QWEN_7B, name='adapted')}", *lora)
    # Frozen weights, and nothing for the reference, which the policy is without its adapters.
    assert "1 actor(s) x 4 bytes a parameter, frozen" in message
    assert "adapters x 16 bytes a parameter" in message
    assert "reference model" not in message and "optimizer state" not in message


def test_runner_resume_values(refusal, tmp_path):
    assert "runner.resume=allways: is no folder; expected auto" in refusal("runner.resume=allways")
    assert "has no manifest.json" in refusal(f"runner.resume={tmp_path}")


def test_a_data_set_of_the_hub_is_named_by_rule(refusal):
    message = refusal("data.train_paths=['hub:a/b:c:d:e']")
    assert "data.train_paths: hub:a/b:c:d:e: write hub:ORGANIZATION/NAME" in message


def test_disk_space(refusal, make_model):
    # 1.777e9 parameters x 14 bytes = 23.2 GiB a checkpoint, and 2 bytes = 3.3 GiB for the folder.
    gpus = Machine(gpus=8, torch_build="2.13.0", memory_bytes=2**40, disk_bytes=90 * 2**30)
    overrides = ["cluster=gpu8", f"model.path={make_model(QWEN_1_5B)}", "model.dtype=bfloat16"]
    message = refusal(*overrides, machine=gpus)
    assert "4 checkpoints (kept ones and one being written) x 23.2 GiB" in message
    assert "make 96.0 GiB, but 90.0 GiB are free there; use another disk, or" in message
    assert "runner.keep_checkpoints=2" in message
    best = refusal(*overrides, "runner.best_metric=rollout/rewards", machine=gpus)
    assert "5 checkpoints" in best and "runner.keep_checkpoints=1" in best
    reset = ["algorithm.kl_coef=0.1", "algorithm.reference.kind=reset"]
    assert "x 26.5 GiB" in refusal(*overrides, *reset, machine=gpus)  # 2 bytes more.
    # 18.5 million adapter parameters of rank 16 x 14 bytes.
    few = dataclasses.replace(gpus, disk_bytes=2**30)
    message = refusal(*overrides, "actor.lora.rank=16", machine=few)
    assert "4 checkpoints (kept ones and one being written) x 0.2 GiB" in message


def test_the_space_of_a_runs_own_checkpoints_counts_when_it_resumes(
    base, refusal, make_model, tmp_path
):
    """Without it a run that fills its disk as planned could not be resumed."""
    gpus = Machine(gpus=8, torch_build="2.13.0", memory_bytes=2**40, disk_bytes=27 * 2**30)
    overrides = ["cluster=gpu8", f"model.path={make_model(QWEN_1_5B)}", "model.dtype=bfloat16"]
    shard = tmp_path / "run" / "checkpoints" / "step_000050" / "shard"
    shard.parent.mkdir(parents=True)
    with shard.open("wb") as file:
        file.truncate(3 * 24 * 2**30)  # Takes no room here.
    check(load([*base, *overrides, "runner.resume=auto"]), "train", gpus)
    fresh = refusal(*overrides, "runner.resume=never", machine=gpus)
    assert "27.0 GiB are free there; use another disk" in fresh
    with shard.open("wb") as file:
        file.truncate(20 * 2**30)
    message = refusal(*overrides, "runner.resume=auto", machine=gpus)
    assert "27.0 GiB are free there and earlier checkpoints hold 20.0 GiB; use" in message


@pytest.fixture
def closed_folder(tmp_path):
    """A folder in which nothing can be made, for root too, whom modes do not stop."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if os.geteuid() != 0:
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "rlmath-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"root can write anywhere, and may not mount here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@on_cases("given, expected", __file__, "tensor_groups")
def test_tensor_groups_wider_than_a_node(refusal, given, expected):
    on_two = [
        *("cluster.device=cuda", "cluster.nodes=2", "cluster.ray_address=auto"),
        "algorithm.prompts_per_step=96",
    ]
    message = refusal(*on_two, *given, machine=GPU_MACHINE)
    for part in expected:
        assert part in message
    # Beside a mistake that stays: as wide as divides a node, they are placed.
    narrow = given[1].partition("=")[0] + "=2"
    other = refusal(*on_two, *given, narrow, "actor.optimizer.lr=-1", machine=GPU_MACHINE)
    assert "groups of" not in other


def test_a_run_dir_without_permission(refusal, closed_folder):
    message = refusal(f"runner.run_dir={closed_folder}/run")
    assert f"runner.run_dir={closed_folder}/run: " in message and "give another folder" in message


def test_a_run_dir_that_is_a_file(refusal, make_data):
    file = make_data(name="taken.jsonl")
    assert f"{file} is a file" in refusal(f"runner.run_dir={file}/run")


def test_gpus_of_this_machine(refusal):
    few = Machine(gpus=2, torch_build="2.13.0", memory_bytes=2**40)
    message = refusal("cluster=gpu8", machine=few)
    assert "cluster.gpus_per_node=8: this machine has 2" in message
    hidden = Machine(gpus=2, torch_build="2.13.0+cpu", memory_bytes=2**40)
    assert "torch here is 2.13.0+cpu, without CUDA" in refusal("cluster=gpu8", machine=hidden)
    message = refusal("cluster=gpu8", "actor.tensor_parallel=3", machine=GPU_MACHINE)
    assert "8 / 3 is no whole number of copies" in message
    message = refusal("cluster=gpu8", "weights.transport=nccl", machine=GPU_MACHINE)
    assert "weights.transport=nccl: on CUDA with colocated GPUs it has to be ipc" in message
    assert "on CPU it has to be shared_memory" in refusal("weights.transport=nccl")


def test_all_problems_come_together(refusal):
    message = refusal("actor.tensor_parallel=3", "algorithm.loss=x", "model.dtype=float32")
    assert message.splitlines()[0] == "2 errors"


def test_device_follows_the_machine():
    assert CPU_MACHINE.device(Device.auto) is Device.cpu
    assert GPU_MACHINE.device(Device.auto) is Device.cuda
    assert GPU_MACHINE.device(Device.cpu) is Device.cpu
    here = Machine.here()
    assert here.memory_bytes > 2**30


def test_visible_gpus_follow_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert Machine.here().gpus == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Machine.here().gpus == 0


def test_context_ranks_on_gpus_have_no_windows(refusal, make_model):
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    given = [
        f"model.path={make_model(QWEN_1_5B | mistral, name='mistral')}",
        "data.max_prompt_tokens=512",
        "actor.context_parallel=2",
        "cluster.gpus_per_node=2",
    ]
    longer = refusal(*given, "rollout.max_response_tokens=1024", machine=GPU_MACHINE)
    assert "512 prompt + 1024 response = 1536 tokens" in longer
    assert "set it to 1, or rollout.max_response_tokens=512 or less" in longer
    shorter = refusal(
        *given, "rollout.max_response_tokens=512", "actor.optimizer.lr=-1", machine=GPU_MACHINE
    )
    assert "windows" not in shorter


def test_experts_are_shared_out_whole(refusal, make_model):
    sizes = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "moe_intermediate_size": 36,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "vocab_size": 100,
    }
    folder = make_model(QWEN_1_5B | sizes)
    mixture = f"model.path={folder}"
    message = refusal(mixture, "actor.expert_parallel=4", "actor.data_parallel=6")
    assert "6 experts / 4 leaves 2, 1 tensor x 6 data-parallel ranks / 4 leaves 2" in message
    assert "works: 1, 2, 3 or 6" in message
    message = refusal(mixture, "actor.tensor_parallel=8")
    assert "width of an expert 36 / 8 leaves 4" in message
    assert "needs actor.sequence_parallel=true" in message
    message = refusal("actor.expert_parallel=2", "actor.data_parallel=2")
    assert "the model has no experts" in message
