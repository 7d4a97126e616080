"""An MoE's engine gets all that its workers read when each gets its share of the experts alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.requests import EngineSpec
from rlmath.weights.fingerprint import fingerprints
from rlmath.weights.hf_files import HfFolderReader
from rlmath.weights.pieces import expert_tensors


@pytest.mark.long
def test_workers_of_an_engine_need_their_own_slices(
    ray_session: None, engine_spec: EngineSpec, tmp_path: Path
) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        # No multiple of 32 for a worker: vLLM pads experts on a CPU.
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    spec = read_model_spec(str(tmp_path / "hf"))
    with HfFolderReader(tmp_path / "hf", spec) as reader:
        tensors = {name: 3 * reader.read(name) for name in reader.names()}
    save_file(tensors, tmp_path / "new.safetensors")
    file, experts = str(tmp_path / "new.safetensors"), expert_tensors(spec)

    def load(worker: Any) -> Any:
        """Load the file with NaN where this worker has no share of an expert."""
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        from rlmath.weights.runs import Run
        from rlmath.weights.transports.engine_parts import expert_share
        from rlmath.weights.transports.shared_memory_engine import _pack_experts_again

        model, tensors = worker.model_runner.get_model(), load_file(file)
        share = expert_share(model)
        assert share is not None
        for name, expert in experts.items():
            whole, dim = tensors[name], 1 if "down_proj" in name else 0
            tensors[name] = torch.full_like(whole, torch.nan)
            run = Run(name, dim, 0, tuple(whole.shape))
            part = share.of(run, expert, whole.shape[dim])
            if part is not None:
                part.of(tensors[name]).copy_(part.of(whole))
        _pack_experts_again(model)
        initialize_layerwise_reload(model)
        model.load_weights(tensors.items())
        finalize_layerwise_reload(model, worker.model_config)
        return share

    wide = replace(
        engine_spec, model_path=str(tmp_path / "hf"), dtype="bfloat16", tensor_parallel=2
    )
    with RolloutPool(wide, num_engines=1, stall_timeout_s=120) as pool:
        expected = fingerprints(tensors.items())
        assert pool.weights_fingerprints()[0] != expected
        for _ in range(2):
            (shares,) = pool.call_workers(load)
            assert [(one.experts, one.part, one.parts) for one in shares] == [
                (None, 0, 2),
                (None, 1, 2),
            ]
            assert pool.weights_fingerprints()[0] == expected
