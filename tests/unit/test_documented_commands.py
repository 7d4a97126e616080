"""Every command of README and docs, as it is written: run here, or checked as far as it can be.

A command that needs a cluster, a GPU, a network or minutes is composed and checked, with its
settings and files, on a machine that is described to the checks; where another test runs it, that
is named. A command that no rule knows fails, and so does a rule that no command needs.
"""

import argparse
import contextlib
import functools
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hub_sources import SOURCES
from rlmath.checks.machine import Machine
from rlmath.checks.run import check
from rlmath.cli import COMMANDS as OF_RLMATH
from rlmath.cli import main
from rlmath.commands import grade as grade_command
from rlmath.commands.selfcheck import cli as selfcheck
from rlmath.commands.selfcheck.catalog import select
from rlmath.config.command_line import take_settings
from rlmath.config.groups import options
from rlmath.config.load import load, save
from rlmath.monitor.summary import update_summary
from rlmath.quickstart import EXPERIMENTS
from tests.unit.documented import ROOT, Command, documented_commands, make_clone
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401

# A documented command may import a plug-in.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("own_plugins")]

COMMANDS = documented_commands()
NODE = Machine(gpus=8, torch_build="2.13.0", memory_bytes=2**41, disk_bytes=2**44)
CPU = Machine(gpus=0, torch_build="2.13.0+cpu", memory_bytes=24 * 2**30, disk_bytes=2**40)
How = Callable[[Command, pytest.MonkeyPatch], None]


# -- ways of running a command ------------------------------------------------------------------


def run(command, patch):
    """To its end, in this process."""
    assert main(command.words[1:]) == 0


def run_in_shell(command, patch):
    """To its end, by a shell, word for word."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command.text], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_doctor(command, patch):
    """It has a line for everything, and finds nothing wrong with the settings, if there are any."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main([word for word in command.words[1:] if not word.startswith("model.path=")])
    lines = {" ".join(line.split()[:2]): line for line in said.getvalue().splitlines() if line}
    settings = {"ok train"} if len(command.words) > 2 else set()
    assert {"ok Python", "ok packages"} | settings <= set(lines)


def plan_and_write(command, patch):
    """A plan that becomes an experiment, which may be there from the next rule."""
    experiment_of(command).unlink(missing_ok=True)
    run(command, patch)
    assert experiment_of(command).is_file()


def check_planned(command, patch):
    """``--check``, on a login node, of an experiment that a plan of the docs writes."""
    (name,) = [word[11:] for word in command.words if word.startswith("experiment=")]
    (plan,) = [one for one in COMMANDS if f"--write {name} " in one.text]
    if not experiment_of(plan).is_file():
        run(plan, patch)
    check_settings_on_cpu(command, patch)


def experiment_of(plan):
    words = plan.words
    name, folder = (words[words.index(one) + 1] for one in ("--write", "--config-dir"))
    return Path(folder) / "experiment" / f"{name}.yaml"


def publish_card(command, patch):
    """The run of the card has ended."""
    folder = Path(command.words[2])
    save(
        load(["experiment=qwen2.5-1.5b-grpo-megatron", f"runner.run_dir={folder}"]),
        folder / "config.yaml",
    )
    update_summary(folder, {"steps": 70})
    (folder / "hf").mkdir(exist_ok=True)
    (folder / "hf" / "config.json").write_text("{}")
    run(command, patch)


# -- ways of checking one -----------------------------------------------------------------------


def check_drill(command, patch):
    """Its settings, shrunk, and the names of its faults."""
    words = command.words[1:]
    assert main([*words, "--check"]) == 0
    has_test("e2e/test_drill.py", words[1])(command, patch)


def check_settings(command, patch, machine=NODE):
    """``--check`` on a node of 8 GPUs: composition, every check, the files. It would take GPUs."""
    patch.setattr(Machine, "here", lambda: machine)
    words = command.words[1:]
    assert main([*words, *["--check"] * ("--check" not in words)]) == 0


# On a machine without GPU. A model would have to run.
check_settings_on_cpu = functools.partial(check_settings, machine=CPU)


def check_cluster(command, patch):
    """A script for 16 nodes is there, and what it gives to ``rlmath train`` passes the checks."""
    program, *words = command.words
    script = words.pop(0) if program == "bash" else program
    if program == "sbatch":
        script = next(word for word in words if word.startswith("launchers/"))
        words = words[words.index(script) + 1 :]
    assert (ROOT / script).is_file()
    if script.endswith("launch_cluster.sh"):
        assert int(words.pop(0)) == 16 * 8
    experiment, *settings = words
    experiment = experiment.replace("EXPERIMENT", "qwen2.5-1.5b-grpo-megatron")
    if "--config-dir" in settings:  # Planned for the nodes that it is submitted to.
        (plan,) = [one for one in COMMANDS if f"--write {experiment} " in one.text]
        nodes = next(word for word in command.words if word.startswith("--nodes="))
        assert f"cluster.{nodes.removeprefix('--')}" in plan.words
        if not experiment_of(plan).is_file():
            run(plan, patch)
        settings = [word.replace("$PWD", str(Path.cwd())) for word in settings]
        patch.setattr(Machine, "here", lambda: NODE)
        address = "cluster.ray_address=HOST:6379"
        assert main(["train", f"experiment={experiment}", address, *settings, "--check"]) == 0
        return
    assert experiment in options("experiment")
    of_cluster = ["cluster.nodes=16", "cluster.ray_address=HOST:6379"]
    patch.setattr(Machine, "here", lambda: NODE)
    assert main(["train", f"experiment={experiment}", *of_cluster, *settings, "--check"]) == 0


def check_kubernetes(command, patch):
    """The manifest's entry point, with the volume in the place where this test has its files."""
    manifest = yaml.safe_load(Path(command.words[-1]).read_text())
    words = manifest["spec"]["entrypoint"].replace("/shared/", "").split()
    assert words.pop(0) == "rlmath"
    workers = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (1 + workers["replicas"]) * int(workers["rayStartParams"]["num-gpus"]) == 128
    patch.setattr(Machine, "here", lambda: NODE)
    assert main([*words, "--check"]) == 0


def check_quickstart(command, patch):
    """Its settings. Setting up and training take minutes."""
    patch.setattr(Machine, "here", lambda: CPU)
    words = command.words[2:]
    chosen = [] if any(one in words for one in EXPERIMENTS) else EXPERIMENTS[:1]
    assert main(["train", *chosen, *words, "--check"]) == 0
    has_test("e2e/test_quickstart.py")(command, patch)


def check_sources(command, patch):
    """Data sets that are known; a network would have to be there. With ``--from`` another test runs
    it on rows of each."""
    words = command.words[2:]
    names = words[: words.index("--to")]
    assert set(names) <= set(SOURCES)
    has_test("unit/toolkits/test_data_toolkits.py")(command, patch)
    has_options(command, patch)


def write_in_shell(command, patch):
    """The file that it writes is there only for the commands after it."""
    Path(command.words[command.words.index("--to") + 1]).unlink(missing_ok=True)
    run_in_shell(command, patch)


def check_filter(command, patch):
    """Its settings are those of an evaluation of the file; a model would have to run."""
    check_sample(command, patch)
    has_options(command, patch)


def check_sample(command, patch):
    """Likewise; tests/e2e/test_sample_run.py runs one."""
    settings = [word for word in command.words if re.match(r"[a-z_.]+=", word)]
    file = command.words[2]
    check(load([*settings, f"data.eval_paths=[{file}]"]), "evaluate", NODE)


def has_options(command, patch):
    """The script explains itself and knows the options that are given."""
    words = command.words
    if "-m" in words:
        script = words.index("-m") + 1
        text = help_of(words[script].replace(".", "/") + ".py")
    else:
        script = words.index(next(word for word in words if word.endswith((".py", ".sh"))))
        text = help_of(words[script])
    for option in (word for word in words[script + 1 :] if word.startswith("--")):
        assert option.split("=")[0] in text


@functools.cache
def help_of(script):
    done = subprocess.run(
        [sys.executable, script, "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def parses_selfcheck(command, patch):
    """Its options are known. The checks take minutes; another test runs them."""
    parser = argparse.ArgumentParser()
    selfcheck.add_arguments(parser)
    _, rest = take_settings(command.words[2:], selfcheck.SETTINGS)
    select(parser.parse_args(rest).only)
    has_test("e2e/test_selfcheck.py", "selfcheck")(command, patch)


def parses_grade(command, patch):
    """Its options are known; another test grades files with them."""
    parser = argparse.ArgumentParser()
    grade_command.add_arguments(parser)
    assert parser.parse_args(command.words[2:]).file
    has_test("unit/grading/test_grading_command.py", '"grade"')(command, patch)


def names_tests(command, patch):
    """It would run these tests from within themselves."""
    assert (ROOT / "launchers" / "test.sh").is_file()
    for word in command.words[2:]:
        assert not word.startswith("tests/") or (ROOT / word).exists()


def has_test(path, word=None):
    """Another test, or a script that runs with the tests, runs it. ``path``: below ``tests``."""

    def has_it(command, patch):
        words = command.words
        wanted = word or next(Path(one).stem for one in words if one.endswith((".py", ".sh")))
        assert wanted in (ROOT / "tests" / path).read_text(encoding="utf-8")

    return has_it


def elsewhere(why):
    """It is no program of ours and needs what is not here: ``why``."""

    def nothing(command, patch):
        assert why

    return nothing


# The first rule whose pattern matches the beginning of a command says what happens to it.
RULES = [
    (r"rlmath plan .* --write ", plan_and_write),
    (r"rlmath plan ", run),
    (r"rlmath doctor", run_doctor),
    (r"rlmath settings", run),
    (r"rlmath selfcheck gpu --list", run),
    (r"rlmath selfcheck gpu", parses_selfcheck),
    (r"rlmath grade ", parses_grade),
    (r"rlmath report ", has_test("unit/commands/report/test_report_page.py", '"report"')),
    (r"rlmath drill .*--check", run),
    (r"rlmath drill --table ", has_test("unit/commands/drill/test_catalog.py", '"--table"')),
    (r"rlmath drill ", check_drill),
    (r"rlmath test ", has_test("e2e/test_recipe_test.py", '"test"')),
    (r"rlmath why ", has_test("unit/commands/test_why.py", '"why"')),
    (r"rlmath replay ", has_test("e2e/test_algorithms.py", "check_replay(")),
    (r"rlmath bisect ", has_test("unit/commands/bisect/test_bisect.py", '"bisect"')),
    (r"rlmath explain ", has_test("unit/commands/explain/test_explain_command.py", '"explain"')),
    (r"rlmath publish .* --card-only", publish_card),
    (r"rlmath publish ", has_test("unit/commands/test_publish.py", "publish")),
    (r"rlmath sample ", check_sample),
    (r"rlmath evaluate model=tiny ", check_settings_on_cpu),
    (r"rlmath train experiment=(gsm8k_smoke|quickstart) ", check_settings_on_cpu),
    (r"rlmath train \.\.\.", elsewhere("it stands for any")),
    (r"rlmath train --config-dir my_conf ", check_planned),
    (
        r"rlmath (import|train --config-dir imported) ",
        has_test("unit/commands/importing/test_import.py", '"import"'),
    ),
    (r"rlmath (train|evaluate|sft) ", check_settings),
    (
        r"python -m toolkits.pages.coming_from",
        has_test("unit/commands/importing/test_import.py", "toolkits.pages.coming_from"),
    ),
    (r"python make_data.py", has_test("e2e/test_coming_from.py", "make_data.py")),
    (
        r"python -m toolkits.pages.settings",
        has_test("unit/config/test_settings_page.py", "settings_page"),
    ),
    (r"python -m toolkits.pages.api", has_test("unit/api/test_docs.py", "api_page")),
    (r"python -m rlmath.quickstart.make ", has_test("e2e/conftest.py", "quickstart.make")),
    (
        r"\.venv/bin/python -m tests.e2e.golden_curve",
        has_test("e2e/test_golden_curve.py", "golden_curve"),
    ),
    (r"python -m tests.distributed.healthy_steps", has_options),
    (r"python toolkits/prepare_data.py ", check_sources),
    (r"python toolkits/decontaminate.py ", write_in_shell),
    (r"python toolkits/filter_by_pass_rate.py ", check_filter),
    (r"rlmath validate ", has_test("distributed/test_weights_toolkits.py", "validate_logprobs")),
    (r"rlmath convert ", has_test("distributed/test_weights_toolkits.py", "convert_checkpoint")),
    (r"python benchmarks/", has_options),
    (r"rlmath --help", run),
    (r"bash launchers/quickstart.sh", check_quickstart),
    (r"bash launchers/docs.sh", has_test("unit/test_site.py", "launchers/docs.sh")),
    (r"bash launchers/test.sh", names_tests),
    (r"(RANK=\d+ WORLD_SIZE=16 )bash launchers/launch_cluster.sh ", check_cluster),
    (r"launchers/run_math_grpo.sh ", check_cluster),
    (r"launchers/gpu_run.sh ", has_test("unit/toolkits/test_gpu_run.py")),
    (r"sbatch ", check_cluster),
    (r"kubectl ", check_kubernetes),
    (r"ray_utils/check_ray.sh ", has_test("e2e/test_cluster.py")),
    (r"\.venv/bin/(ruff|mypy)", has_test("../launchers/test.sh", ".venv/bin/mypy")),
    # Up to its refusals it runs in tests/unit/test_scripts.py; the rest takes 10 GB.
    (r"(bash )?launchers/setup.sh cuda", has_test("../launchers/setup.sh", "auto | cpu | cuda)")),
    (r"source .venv/bin/activate", has_test("../launchers/setup.sh", "-m venv .venv")),
    (r"hf download \S+ --local-dir ", elsewhere("fetches a model")),
    (r"hf auth login", elsewhere("asks for a password")),
    (r"docker run ", elsewhere("needs Docker")),
    (r"pip install ", elsewhere("fetches a package")),
]


def rule_of(command):
    found = (at for at, (begin, _) in enumerate(RULES) if re.match(begin, command.text))
    return next(found, -1)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return make_clone(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_documented_command_works(command, clone, monkeypatch):
    at = rule_of(command)
    assert at >= 0, f"no rule says how {command.text!r} is tested; add one"
    monkeypatch.chdir(clone)
    RULES[at][1](command, monkeypatch)


def test_every_rule_is_needed():
    used = {rule_of(command) for command in COMMANDS}
    assert [RULES[at][0] for at in range(len(RULES)) if at not in used] == []


def test_commands_without_arguments_exist():
    """``rlmath sft`` in the text."""
    for page in {command.page for command in COMMANDS}:
        folder = ROOT if (ROOT / page).exists() else ROOT / "docs"
        text = (folder / page).read_text(encoding="utf-8")
        assert set(re.findall(r"`rlmath ([a-z]+)(?: [a-z]+)*`", text)) <= set(OF_RLMATH)
