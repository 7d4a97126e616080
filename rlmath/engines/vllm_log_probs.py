"""Log-probs of a batch from vLLM, computed in a child process.

Megatron's CPU shim and vLLM cannot share a process, so ``vllm_log_probs`` runs this module with the
paths of a model, a request and an answer, and reads the answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from rlmath.errors import WeightsError
from rlmath.model.spec import read_model_spec
from rlmath.plugins import loading
from rlmath.types import TrainingBatch

START_TIMEOUT_S = 600.0
LOG_TAIL_LINES = 15


def vllm_side(folder: str | Path, batch: TrainingBatch, dtype: torch.dtype) -> dict[str, Tensor]:
    """:func:`vllm_log_probs` by the name ``vllm``; empty, with a printed note, where vLLM does not
    compute the model in this type."""
    from rlmath.device import cuda_visible

    if dtype is not torch.bfloat16 and not cuda_visible() and read_model_spec(folder).linear:
        print(
            "vLLM is left out: its CPU kernels of linear attention compute in bfloat16 only; "
            "rlmath validate with model.dtype=bfloat16 compares it"
        )
        return {}
    return {"vllm": vllm_log_probs(folder, batch, dtype)}


def vllm_log_probs(folder: str | Path, batch: TrainingBatch, dtype: torch.dtype) -> Tensor:
    """Log-probabilities of the batch's response tokens from a vLLM engine, at temperature 1.
    Returns ``[R]`` float32, in the batch's order. Raises WeightsError: the engine failed; the
    message ends with its output.

    Args:
        folder: Hugging Face folder.
        batch: Sequences, which the engine reads as prompts.
        dtype: Type of the engine's weights.
    """
    from rlmath.device import cuda_visible
    from rlmath.engines.requests import EngineSpec

    longest = int(batch.sequence_lengths.max())
    with tempfile.TemporaryDirectory() as work:
        request, answer = Path(work) / "request.pt", Path(work) / "answer.pt"
        name = str(dtype).removeprefix("torch.")
        spec = EngineSpec(
            model_path=str(folder),
            dtype=name,  # type: ignore[arg-type]
            device="cuda" if cuda_visible() else "cpu",
            tensor_parallel=1,
            max_sequence_tokens=longest + 1,
            max_running_sequences=16,
            transport="ipc",
            log_dir=work,
        )
        sequences = [s.tolist() for s in batch.tokens.split(batch.sequence_lengths.tolist())]
        torch.save({"sequences": sequences, "dtype": name, "longest": longest + 1}, request)
        environment = {**os.environ, **spec.environment(), **loading.environment()}
        if spec.device == "cpu":
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        command = [sys.executable, "-m", __name__, str(folder), str(request), str(answer)]
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_TIMEOUT_S,
        )
        if done.returncode or not answer.is_file():
            tail = "\n".join(done.stdout.splitlines()[-LOG_TAIL_LINES:])
            raise WeightsError(f"vLLM could not take {folder}:\n{tail}")
        rows: list[Tensor] = torch.load(answer, weights_only=True)
    return torch.cat(
        [row[prompt - 1 :] for row, prompt in zip(rows, batch.prompt_lengths.tolist(), strict=True)]
    )


def _main(folder: str, request: str, answer: str) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    asked = torch.load(request, weights_only=True)
    engine = LLM(
        model=folder,
        dtype=asked["dtype"],
        max_model_len=asked["longest"],
        mamba_ssm_cache_dtype="float32",
        enforce_eager=True,
        # A cached prefix has no log-probs.
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    parameters = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in asked["sequences"]]
    rows = []
    for output in engine.generate(prompts, parameters, use_tqdm=False):
        tokens, given = output.prompt_token_ids, output.prompt_logprobs
        # The first token has nothing before it.
        rows.append(torch.tensor([given[i][tokens[i]].logprob for i in range(1, len(tokens))]))
    torch.save(rows, answer)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
