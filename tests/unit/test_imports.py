"""Imports of a process: seconds of start-up, and Megatron and vLLM must not meet."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

MODULES = "rlmath.training.loop, rlmath.training.sft, rlmath.commands.evaluate"


def test_the_driver_imports_neither_megatron_nor_vllm():
    program = f"import sys, {MODULES}; print({{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "'torch'" in done.stdout
    assert "'megatron'" not in done.stdout and "'vllm'" not in done.stdout


def test_help_needs_no_hydra():
    program = (
        "import contextlib, sys\n"
        "from rlmath.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['train', '--help'])\n"
        "assert 'hydra' not in sys.modules and 'omegaconf' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
