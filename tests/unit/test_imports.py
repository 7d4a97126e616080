"""Imports of a process: seconds of start-up, and Megatron and vLLM must not meet."""

import pytest

from tests.support.program_answers import output_of

pytestmark = pytest.mark.process

MODULES = "rlmath.training.loop, rlmath.training.sft, rlmath.commands.evaluate"


def test_the_driver_imports_neither_megatron_nor_vllm():
    program = f"import sys, {MODULES}; print({{m.partition('.')[0] for m in sys.modules}})"
    found = output_of(program)
    assert "'torch'" in found
    assert "'megatron'" not in found and "'vllm'" not in found


def test_help_needs_no_hydra():
    program = (
        "import contextlib, sys\n"
        "from rlmath.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['train', '--help'])\n"
        "assert 'hydra' not in sys.modules and 'omegaconf' not in sys.modules"
    )
    assert "quickstart" in output_of(program)
