"""The console command: exit codes, one message on standard error, no traceback, in a second."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rlmath
from rlmath.cli import COMMANDS, main
from rlmath.model.tiny import tiny_config
from rlmath.utils.command_line import run_command
from tests.support.program_answers import output_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    return file


def rlmath_process(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "rlmath", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlmath {rlmath.__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"\n  {command} ") == 1 for command in COMMANDS)
    assert main([]) == 2


def test_every_command_exists(capsys):
    for command in ("train", "sft", "evaluate"):
        assert find_spec(COMMANDS[command][0]) is not None
        with pytest.raises(SystemExit) as exit_info:
            main([command, "--help"])
        assert exit_info.value.code == 0
        out = capsys.readouterr().out
        assert "quickstart" in out
        assert "--cfg" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], ["no command 'trian'", "train, sft, evaluate"]),
        (["train", "--nope"], ["unrecognized arguments: --nope", "rlmath train --help"]),
        (["train"], ["model.path has to be given", "experiment=NAME"]),
        (["train", "experiment=quickstart", "actor.tensr_parallel=2"], ["actor.tensor_parallel"]),
        (["sft", "model=tiny", "runner.run_dir=r"], ["sft.train_paths is empty"]),
        (["evaluate", "model=tiny", "runner.run_dir=r"], ["data.eval_paths is empty"]),
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2_with_one_message(arguments, expected, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    for part in expected:
        assert part in captured.err


@pytest.mark.process
def test_a_mistake_costs_a_second_and_shows_no_traceback(tmp_path, problems):
    arguments = ["train", "experiment=gsm8k_smoke", f"data.train_paths=[{problems}]"]
    arguments += ["actor.tensor_parallel=3", "data.answer_key=solution"]
    before = os.times()
    result = rlmath_process(*arguments, cwd=tmp_path)
    after = os.times()
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "actor.tensor_parallel=3" in result.stderr
    assert "data.answer_key=solution" in result.stderr
    # CPU time: the wall clock of a busy machine says little about the command.
    used_s = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    assert used_s < 2, f"took {used_s:.1f} s of CPU"


@pytest.mark.process
def test_help_imports_nothing_heavy(tmp_path):
    code = (
        "import sys\n"
        "from rlmath.cli import main\n"
        "main(['train', 'experiment=quickstart', '--check'])\n"
        # Wrong arguments are reported in a second, whatever the command would do.
        "wrong = (['drill', 'nosuch'], ['drill', 'quickstart', 'no.such=1'], ['test', 'nosuch'],\n"
        "         ['test', 'dapo', 'no.such=1'], ['replay', 'nosuch', '1'], ['watch', 'nosuch'],\n"
        "         ['replay', 'nosuch', '1', 'no.such=1'], ['why', 'nosuch', '1/p/0'],\n"
        "         ['bisect', 'nosuch', 'nosuch'], ['report', 'nosuch'],\n"
        "         ['explain', 'nosuch', '--steps', '1:2'])\n"
        "assert [main(one) for one in wrong] == [2] * len(wrong)\n"
        "print([m for m in ('torch', 'vllm', 'megatron', 'ray', 'transformers') "
        "if m in sys.modules])\n"
    )
    assert output_of(code, cwd=tmp_path) == "[]\n"


@pytest.mark.process
def test_interrupted_exits_130(tmp_path, problems):
    """A real SIGINT, sent while the command waits for a file of the model that is a pipe."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    os.mkfifo(folder / "tokenizer_config.json")
    overrides = ["experiment=gsm8k_smoke", f"model.path={folder}"]
    overrides += [f"data.train_paths=[{problems}]", "data.apply_chat_template=true"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlmath", "train", *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # Opening the pipe's other end returns when the command has opened this one.
        with (folder / "tokenizer_config.json").open("w"):
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted\n"
    finally:
        process.kill()
        process.wait()


def test_a_disk_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")

    def writes(arguments):
        (tmp_path / "file" / "below").write_text("")
        return 0

    def fills(arguments):
        with open("/dev/full", "w") as full:
            full.write("more")
        return 0

    assert run_command(writes, []) == 2
    assert f"error: Not a directory: {tmp_path}/file/below; give" in capsys.readouterr().err
    assert run_command(fills, []) == 2
    assert "error: No space left on device for a file" in capsys.readouterr().err
    with pytest.raises(ChildProcessError):
        run_command(lambda _: os.waitpid(os.getpid(), 0)[0], [])


def test_a_command_of_its_own_refuses_settings_that_it_does_not_use(capsys):
    assert main(["publish", "runs/mine", "me/mine", "actor.layers=local"]) == 2
    assert "this command does not use it" in capsys.readouterr().err
