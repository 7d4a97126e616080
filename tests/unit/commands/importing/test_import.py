import ast
import json
import textwrap
from pathlib import Path

import pytest

from rlmath.algorithms.advantages import ADVANTAGES
from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.correction import CORRECTIONS
from rlmath.algorithms.losses import LOSSES
from rlmath.cli import main
from rlmath.commands.importing.cli import FRAMEWORKS, move_rewards
from rlmath.commands.importing.fact import translate
from rlmath.commands.importing.reading import read
from rlmath.commands.importing.script import rewards_module
from rlmath.config.load import load
from rlmath.config.options import SECTIONS
from rlmath.config.settings import by_key
from rlmath.errors import UserError
from tests.unit.commands.importing.cases import base_of, cases
from toolkits.pages.coming_from import PAGE, page

TRL_CONFIG = Path(__file__).resolve().parents[4] / ".venv/trl/trl/trainer/grpo_config.py"


@pytest.mark.parametrize(("name", "case"), cases())
def test_public_configuration_becomes_these_settings(name, case):
    found = translate(FRAMEWORKS[name], case["given"])
    base = base_of(name)
    expected = {k: v for k, v in base.items() if k not in case.get("dropped", [])}
    assert found.settings == expected | case["expected"], case["from"]
    assert [key for key, _, _ in found.without] == case.get("without", []), case["from"]


def test_every_setting_and_value_of_the_tables_exists():
    options = {
        setting.key
        for section in SECTIONS
        for name in section.registry.names()
        for setting in section.settings(name)
    }
    known = by_key().keys() | options
    registries = {
        "algorithm.loss": LOSSES,
        "algorithm.advantage": ADVANTAGES,
        "algorithm.aggregation": AGGREGATIONS,
        "algorithm.correction.kind": CORRECTIONS,
    }
    for framework in FRAMEWORKS.values():
        keys = {key for fact in framework.facts for key in fact.ours.split()}
        assert keys | framework.base.keys() <= known, keys | framework.base.keys() - known
        theirs = [name for fact in framework.facts for name in fact.theirs.split()]
        assert sorted(theirs) == sorted(set(theirs)), "one row for each of their settings"
    for case in cases():
        for key, value in case.values[1]["expected"].items():
            assert key in known, key
            assert key not in registries or registries[key].has(value), (key, value)


def test_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m toolkits.pages.coming_from"


@pytest.mark.skipif(not TRL_CONFIG.is_file(), reason="launchers/test.sh fetches TRL")
def test_defaults_and_names_are_those_of_the_trl_that_is_tested_with():
    tree = ast.parse(TRL_CONFIG.read_text())
    (cls,) = [one for one in tree.body if isinstance(one, ast.ClassDef)]
    defaults = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            given = {one.arg: one.value for one in node.value.keywords}
            if "default" in given:
                defaults[ast.unparse(node.target)] = ast.literal_eval(given["default"])
    rows = {fact.key: fact for fact in FRAMEWORKS["TRL"].facts if fact.ours or not fact.harmless}
    compared = rows.keys() & defaults.keys()
    wrong = {key: defaults[key] for key in compared if rows[key].default != defaults[key]}
    assert not wrong and len(compared) > 40
    unknown = translate(FRAMEWORKS["TRL"], defaults | {"processes": 8}).without
    assert [key for key, _, text in unknown if "not in the table" in text] == []


SCRIPT = """
    set -x
    # data.train_batch_size=1
    BATCH=${BATCH:-$((256 * 2))}
    HERE=$(pwd)
    if [ "$MODE" = "other" ]; then
        BATCH=7
    else
        extra="trainer.nnodes=2"
    fi
    case "${KIND:-b}" in
        a) rate=1 ;;
        b)
            rate=2e-6
            ;;
    esac
    FILES="['$HOME/a.parquet', '$HOME/b.parquet']"
    DATA=(
        data.train_batch_size=${BATCH}   # prompts
        data.train_files="$FILES"
        data.max_response_length=$((BATCH + 12))
    )
    DATA+=(+data.seed=3)
    python3 -m verl.trainer.main_ppo --config-name=x \\
        "${DATA[@]}" $extra \\
        actor_rollout_ref.actor.optim.lr=${rate} \\
        actor_rollout_ref.model.path=$NOWHERE \\
        algorithm.adv_estimator=grpo "$@"
"""


def test_shell_script_of_verl(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(textwrap.dedent(SCRIPT))
    name, values, unread = read(file)
    assert name == "verl"
    assert values == {
        "data.train_batch_size": 512,
        "data.train_files": ["~/a.parquet", "~/b.parquet"],
        "data.max_response_length": 524,
        "data.seed": 3,
        "trainer.nnodes": 2,
        "actor_rollout_ref.actor.optim.lr": 2e-6,
        "algorithm.adv_estimator": "grpo",
    }
    assert len(unread) == 1 and "actor_rollout_ref.model.path" in unread[0]


def test_yaml_of_verl_with_references(tmp_path):
    file = tmp_path / "ppo.yaml"
    file.write_text(
        "defaults: [x]\ndata: {train_batch_size: 64, max_response_length: 100}\n"
        "actor_rollout_ref:\n  actor: {optim: {lr: 1e-5}, "
        "ppo_mini_batch_size: '${data.train_batch_size}'}\n"
        "  rollout: {n: '${oc.select:nothing.there,4}'}\n"
    )
    name, values, _ = read(file)
    found = translate(FRAMEWORKS[name], values).settings
    assert name == "verl" and found["actor.optimizer.lr"] == 1e-5
    assert found["algorithm.minibatches_per_step"] == 1 and found["algorithm.group_size"] == 4


TRAINER = """
    import os
    from trl import GRPOConfig, GRPOTrainer
    length = 512
    os.mkdir(FOLDER)

    def right(completions, **kwargs):
        return [1.0] * len(completions)

    def main(options):
        settings = GRPOConfig(
            max_completion_length=length - 12, learning_rate=5e-6, num_generations=4,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=8,
            temperature=options.temperature, loss_type="dr_grpo", max_steps=100, beta=0.04,
            use_vllm=True, **options.more,
        )
        GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=[right], args=settings)
"""


def test_python_script_of_trl_is_not_executed(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(TRAINER).replace("FOLDER", repr(str(tmp_path / "made"))))
    name, values, unread = read(file, processes=2)
    assert not (tmp_path / "made").exists()
    found = translate(FRAMEWORKS[name], values)
    expected = {
        "model.path": "Qwen/Qwen3-0.6B",
        "reward.items": [{"name": f"{file}:right"}],
        "rollout.max_response_tokens": 500,
        # 4 x 2 processes x 8 batches = 64 completions of 16 prompts, in 8 / 2 optimizer steps.
        "algorithm.prompts_per_step": 16,
        "algorithm.group_size": 4,
        "algorithm.minibatches_per_step": 4,
        "runner.steps": 25,
        "algorithm.aggregation": "seq_sum_constant",
        "algorithm.kl_coef": 0.04,
        "algorithm.kl_estimator": "k3_unbiased",
        "algorithm.correction.kind": "seq_mask_sum",
        "algorithm.advantage_options.epsilon": 1e-4,
        "cluster.gpus_per_node": 2,
    }
    assert {key: found.settings[key] for key in expected} == expected
    assert [line.partition(": ")[2].split("=")[0] for line in unread] == [
        "temperature",
        "**options.more of GRPOConfig is not read",
    ]


OWN_REWARDS = """
    import re, os
    from dataclasses import dataclass
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.rewards import accuracy_reward, think_format_reward
    from scoring import short as brief
    import train_everything

    FIRST = SECOND = 3

    @dataclass
    class Rule:
        best: int = FIRST

    rule = Rule()
    train_everything.now()

    def helper(text):
        return re.findall("x", text)

    @staticmethod
    async def mine(completions, **_):
        return [rule.best - len(helper(one)) for one in completions]

    GRPOTrainer("m", [mine, brief, accuracy_reward, think_format_reward, made], GRPOConfig(), DATA)
"""


def trl_script(folder, data):
    file = folder / "own.py"
    file.write_text(textwrap.dedent(OWN_REWARDS).replace("DATA", data))
    (folder / "scoring.py").touch()
    return file


def test_rewards_of_a_trl_script_are_found_and_moved(tmp_path):
    file = trl_script(tmp_path, "load_dataset('a/b')")
    _, values, _ = read(file)
    assert values["reward_funcs"] == [
        f"{file}:mine",
        f"{tmp_path / 'scoring.py'}:short",
        "math",
        "trl.rewards:think_format_reward",
        "made",
    ]
    found = translate(FRAMEWORKS["TRL"], values)
    assert any("made: give the file" in one for one in found.differs)
    module = tmp_path / "moved.py"
    assert move_rewards(found, file, module) == ["mine"]
    assert found.settings["reward.items"][0] == {"name": f"{module}:mine"}
    text = rewards_module(file.read_text(), ["mine"])
    kept = [line.split("(")[0] for line in text.splitlines() if line and line[0] != " "]
    assert kept == [
        "import re",
        "from dataclasses import dataclass",
        "FIRST = SECOND = 3",
        "@dataclass",
        "class Rule:",
        "rule = Rule",
        "def helper",
        "@staticmethod",
        "async def mine",
    ]
    compile(text, "moved.py", "exec")


@pytest.mark.parametrize(
    ("made", "paths"),
    [
        ("load_dataset('a/b', 'c', split='dev')", ["hub:a/b:c:dev"]),
        ("load_dataset('a/b')['dev']", ["hub:a/b::dev"]),
        ("load_dataset('a/b')", ["hub:a/b::train"]),
        ("load_dataset('json', data_files='t.jsonl')['train']", ["t.jsonl"]),
        ("load_dataset('csv', data_files={'train': ['a.csv', 'b.csv']})", ["a.csv", "b.csv"]),
        ("load_dataset('a/b').map(f)", None),
        ("load_dataset(choose())", None),
    ],
)
def test_data_of_a_trl_script(tmp_path, made, paths):
    for data in (made, "rows"):
        file = trl_script(tmp_path, data)
        file.write_text(f"rows = {made}\n{file.read_text()}")
        _, values, unread = read(file)
        found = translate(FRAMEWORKS["TRL"], values).settings.get("data.train_paths")
        assert found == paths
        assert any("write its rows to a file" in one for one in unread) == (paths is None)
    file.write_text(f"rows = rows.map(f)\n{file.read_text()}")
    assert "dataset_name" not in read(file)[1], "rows that the script changes are others"


def test_other_commands_of_a_script_are_not_openrlhfs(tmp_path):
    file = tmp_path / "jobs" / "run.sh"
    file.parent.mkdir()
    file.write_text(
        'HERE="$(cd "$(dirname "$0")/.." && pwd)"\n'
        "python -m openrlhf.models.remote_rm.math_verifier --input_key problem --port 5000 &\n"
        "ray start --head --num-gpus 2\n"
        "ray job submit --address=a --runtime-env-json='{}' -- \\\n"
        "  python3 -m openrlhf.cli.train_ppo_ray --pretrain $HERE/model --bf16 \\\n"
        "  --remote_rm_url http://a/get_reward,http://b/get_reward\nray stop\n"
    )
    name, values, _ = read(file)
    assert values == {
        "pretrain": f"{file.parent}/../model",
        "bf16": True,
        "remote_rm_url": "http://a/get_reward,http://b/get_reward",
    }
    (item,) = translate(FRAMEWORKS[name], values).settings["reward.items"]
    servers = ["http://a/get_reward", "http://b/get_reward"]
    assert item == {"name": "remote", "params": {"urls": servers}}


def test_command_line_of_openrlhf(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 \\\n"
        "  --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 \\\n"
        "  --actor.eps_clip_low_high 0.2 0.27 --rollout.batch_size 128 --train.batch_size 256 \\\n"
        "  --rollout.n_samples_per_prompt 8 --reward.remote_url rewards.py --n_unknown 3\n"
    )
    name, values, _ = read(file)
    found = translate(FRAMEWORKS[name], values)
    assert name == "OpenRLHF"
    assert found.settings["algorithm.minibatches_per_step"] == 4
    options = {"clip_low": 0.2, "clip_high": 0.27, "dual_clip": None}
    assert found.settings["algorithm.loss_options"] == options
    assert found.settings["reward.items"] == [{"name": "rewards.py:reward_func"}]
    assert "algorithm.kl_in" not in found.settings
    assert [key for key, _, _ in found.without] == ["n_unknown"]


def test_epochs_become_steps_with_the_number_of_rows():
    verl = {"data.train_batch_size": 100, "trainer.total_epochs": 3}
    assert "runner.steps" not in translate(FRAMEWORKS["verl"], verl).settings
    assert translate(FRAMEWORKS["verl"], verl, rows=1050).settings["runner.steps"] == 30
    trl = {"processes": 8, "num_train_epochs": 2, "warmup_ratio": 0.1}
    found = translate(FRAMEWORKS["TRL"], trl, rows=100).settings
    assert found["runner.steps"] == 25 and found["actor.optimizer.warmup_steps"] == 3


def test_import_lists_differing_meanings():
    def differences(name, **values):
        given = {key.replace("__", "."): value for key, value in values.items()}
        return "\n".join(translate(FRAMEWORKS[name], given).differs)

    actor = "actor_rollout_ref__actor__"
    assert "counted in rollouts" in differences("verl", **{f"{actor}optim__lr_warmup_steps": 5})
    assert "k2 has its gradient" in differences(
        "verl", **{f"{actor}use_kl_loss": True, f"{actor}kl_loss_type": "low_var_kl+"}
    )
    assert "micro-batch" in differences("TRL", loss_type="bnpo", processes=8)
    assert "1e-4" in differences("TRL", processes=8)
    assert "--gpus" in differences("TRL")
    assert "vespo" in differences("TRL", loss_type="vespo", processes=8)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.py", "print(1)", "has no GRPOConfig"),
        ("a.py", "def (", "is no Python (line 1"),
        ("a.sh", "echo 1", "starts none of"),
        ("a.sh", "python -m verl.trainer.main_ppo", "no key=value of verl"),
        ("a.yaml", "- 1", "has to be a mapping"),
        ("a.json", "{", "cannot be parsed"),
        ("a.yaml", "num_generations: 16", "= 8 completions are no multiple of num_generations=16"),
        ("a.yaml", "learning_rate: 1\nbeta: high", "beta=high: this has to be a number"),
    ],
)
def test_file_that_cannot_be_imported(tmp_path, name, text, part):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UserError) as error:
        framework, values, _ = read(file)
        translate(FRAMEWORKS[framework], values)
    assert part in str(error.value)
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "missing.yaml")


def test_command_writes_an_experiment_that_composes(tmp_path, capsys):
    file = tmp_path / "grpo.json"
    file.write_text(json.dumps({"num_generations": 8, "top_p": 0.9, "new_option": 1}))
    words = ["import", str(file), "--config-dir", str(tmp_path / "mine"), "--gpus", "4"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "none     top_p=0.9" in printed and "none     new_option=1" in printed
    assert "differs  data.train_paths" in printed
    config = load(["experiment=grpo"], tmp_path / "mine")
    assert config.algorithm.prompts_per_step == 4 and config.algorithm.loss == "ppo_clip"
    assert config.runner.run_dir == "runs/grpo"
    assert main(words) == 2  # It is there.
    assert main([*words, "--name", "a/b"]) == 2
