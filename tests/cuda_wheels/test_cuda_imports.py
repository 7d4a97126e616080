"""Every module that a run on GPUs loads can be imported with the CUDA wheels."""

import os
import subprocess
import sys

import pytest

from tests.cuda_wheels.programs import answer_of


@pytest.mark.parametrize(("which", "at_least"), [("project", 280), ("vllm", 40), ("training", 40)])
def test_modules_import(which, at_least):
    answer = answer_of("imports_program", which)
    assert answer["failed"] == {}
    assert answer["modules"] >= at_least


def test_transformer_engine_takes_cudnn_from_the_packages(tmp_path):
    """Its loader would take the toolkit's, which here is no library at all."""
    toolkit = tmp_path / "lib64"
    toolkit.mkdir()
    for name in ("libcudnn.so.9", "libnvrtc.so.13", "libcurand.so.10"):
        (toolkit / name).write_text("of another version")
    program = (
        "from rlmath.utils import transformer_engine as te; print(te.import_error())\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(*sorted({one for one in maps if one.endswith('libcudnn.so.9')}))"
    )
    hidden = {f"{name}_HOME" for name in ("CUDNN", "NVRTC", "CURAND")}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    error, libraries = done.stdout.strip().splitlines()[-2:]
    assert error == "None", done.stderr
    assert len(libraries.split()) == 1 and "/nvidia/cudnn/" in libraries


def test_an_engine_that_prepares_leaves_the_gpu_alone():
    """It does so while the ranks settle on that GPU, whose memory vLLM then measures."""
    program = (
        "from tests.cuda_wheels.forged import forge_gpus, forge_vllm\n"
        "forge_gpus(); forge_vllm()\n"
        "from rlmath.engines.step_loop import import_vllm; import_vllm('cuda')\n"
        "import sys, torch\n"
        "print('vllm.v1.worker.gpu_worker' in sys.modules, torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().splitlines()[-1:] == ["True False"], done.stderr
