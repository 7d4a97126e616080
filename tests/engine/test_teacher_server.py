"""A teacher on a real vLLM server on CPU, that reads prompts in chunks and keeps their prefixes."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from reference import Reference
from test_teacher import expected_scores, sequences

from rlmath.errors import UserError
from rlmath.rollout.teacher_server import ServerTeacher

pytestmark = pytest.mark.long

START_S = 300.0


@pytest.fixture(scope="module")
def url(model_folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "model": model_folder,
        "served-model-name": "teacher",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-batched-tokens": 160,
        "max-num-seqs": 8,
    }
    given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    log = tmp_path_factory.mktemp("server") / "log"
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given),
                *("--enforce-eager", "--enable-chunked-prefill", "--enable-prefix-caching"),
            ],
            env=os.environ | variables,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        found = f"http://127.0.0.1:{port}/v1"
        deadline = time.monotonic() + START_S
        while not _answers(f"{found}/models"):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield found
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_log_probs_of_a_server_are_those_of_transformers(url, model_folder):
    teacher = ServerTeacher(
        url, None, sequence_tokens=512, connections=8, timeout_s=120, attempts=2
    )
    teacher.probe()
    given = sequences(16)
    wanted = expected_scores(Reference(model_folder), given)
    for _ in range(2):  # The second time the server has the prefixes.
        found = [call.result(120) for call in [teacher.submit(one) for one in given]]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    teacher.close()


def test_a_server_whose_sequences_are_too_short_is_refused(url):
    teacher = ServerTeacher(
        url, "teacher", sequence_tokens=513, connections=1, timeout_s=9, attempts=1
    )
    with pytest.raises(UserError, match=r"takes 512 tokens there.*--max-model-len 513"):
        teacher.probe()
