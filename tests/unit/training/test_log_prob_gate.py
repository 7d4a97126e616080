"""The gate, the mismatch metrics and the correction, on a batch with planted differences."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.algorithms.correction import CorrectionConfig, CorrectionKind
from rlmath.algorithms.losses.dppo import Divergence, DppoOptions
from rlmath.config.load import load
from rlmath.config.schema import RunnerConfig
from rlmath.monitor import open_monitor
from rlmath.training.algorithm_settings import update_settings
from rlmath.training.mismatch import (
    AlignmentError,
    alignment_limit,
    apply_correction,
    check_alignment,
    check_mismatch,
    mismatch_metrics,
)
from rlmath.types import TrainingBatch

MOE_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
GIVEN = ["model.path=tiny", "runner.run_dir=r"]


def batch_of(differences: list[list[float]], versions: list[int]) -> TrainingBatch:
    """Sequences whose actor's log-probs are -1 and whose engine's are lower by ``differences``."""
    lengths = torch.tensor([len(row) for row in differences])
    flat = torch.tensor([d for row in differences for d in row])
    n, r = len(differences), flat.numel()
    return TrainingBatch(
        tokens=torch.zeros(2 * n + r, dtype=torch.int64),
        prompt_lengths=torch.full((n,), 2),
        response_lengths=lengths,
        group_ids=torch.arange(n),
        weights_versions=torch.tensor(versions),
        rewards=torch.zeros(n),
        engine_log_probs=-1.0 - flat,
        advantages=torch.ones(r),
        loss_mask=torch.ones(r, dtype=torch.bool),
        old_log_probs=torch.full((r,), -1.0),
    )


def test_mismatch_by_lag() -> None:
    batch = batch_of([[0.0, 0.0], [math.log(2.0)]], versions=[4, 3])
    assert batch.old_log_probs is not None
    found = mismatch_metrics(batch.old_log_probs, batch, now=4)
    assert found["mismatch/mean_w"] == pytest.approx(4 / 3)
    assert found["mismatch/effective_sample_size"] == pytest.approx(16 / 6 / 3)
    assert found["mismatch/lag_0/mean_w"] == 1.0
    assert found["mismatch/lag_1/mean_w"] == pytest.approx(2.0)
    assert found["mismatch/lag_1/k3"] == pytest.approx(1.0 - math.log(2.0))
    assert found["mismatch/lag_1/token_count"] == 1
    fresh = dataclasses.replace(batch, weights_versions=torch.tensor([4, 4]))
    assert not [k for k in mismatch_metrics(batch.old_log_probs, fresh, now=4) if "lag" in k]


def test_the_gate_looks_at_samples_of_the_present_weights_alone() -> None:
    config = load([*GIVEN, "alignment.max_mean_exp_abs_diff=1.05"])
    batch = batch_of([[0.0, 0.0], [0.7]], versions=[4, 3])
    assert batch.old_log_probs is not None
    found = check_alignment(config, batch.old_log_probs, batch, 4, gate=True)
    assert found["alignment/max_abs_diff"] == 0.0
    with pytest.raises(
        AlignmentError, match=r"2\.0138 over 1 tokens.*response token 2.*sequence 1"
    ):
        check_alignment(config, batch.old_log_probs, batch, 3, gate=True)
    found = check_alignment(config, batch.old_log_probs, batch, 3, gate=False)
    assert found["alignment/mean_exp_abs_diff"] > 2
    assert check_alignment(config, batch.old_log_probs, batch, 9, gate=True) == {}


def test_the_limit_is_that_of_the_type_unless_given(tmp_path: Path) -> None:
    sizes = dict.fromkeys(MOE_SIZES, 4) | {"architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    mixture = [*GIVEN, f"model.path={tmp_path}"]
    assert alignment_limit(load([*mixture, "model.dtype=bfloat16"])) == 1.05
    assert alignment_limit(load([*mixture, "model.dtype=float32"])) == 1.0001
    assert alignment_limit(load([*GIVEN, "model.dtype=float32"])) == 1.0001
    assert alignment_limit(load([*GIVEN, "model.dtype=bfloat16"])) == 1.02
    assert alignment_limit(load([*GIVEN, "alignment.max_mean_exp_abs_diff=1.5"])) == 1.5


def session_of(*overrides: str) -> Any:
    pool = SimpleNamespace(weights_version=4)
    return SimpleNamespace(config=load([*GIVEN, *overrides]), sampling=SimpleNamespace(pool=pool))


def test_a_failed_gate_stops_or_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apart = batch_of([[0.5, 0.5], [0.7]], versions=[4, 4])
    assert apart.old_log_probs is not None
    session = session_of("alignment.on_fail=stop")
    with open_monitor(tmp_path, RunnerConfig(), 3) as monitor:
        with pytest.raises(AlignmentError, match="validate_logprobs"):
            check_mismatch(session, apart.old_log_probs, apart, monitor, 1, gate=True)
        assert check_mismatch(session, apart.old_log_probs, apart, monitor, 6, gate=False)
        warned = session_of("alignment.on_fail=warn")
        assert "warning" not in capsys.readouterr().err
        assert check_mismatch(warned, apart.old_log_probs, apart, monitor, 1, gate=True)
        assert "above 1.02" in capsys.readouterr().err


def test_tokens_that_are_the_same_are_measured_once() -> None:
    """The shortcut of ``check_mismatch`` gives the same numbers as measuring again."""
    batch = batch_of([[0.1, 0.2], [0.7]], versions=[4, 4])
    session = session_of("alignment.max_mean_exp_abs_diff=9")
    assert batch.old_log_probs is not None
    found = check_mismatch(session, batch.old_log_probs, batch, None, 1, gate=True)  # type: ignore[arg-type]
    assert mismatch_metrics(batch.old_log_probs, batch, now=4).items() <= found.items()
    masked = dataclasses.replace(batch, loss_mask=torch.tensor([True, True, False]))
    found = check_mismatch(session, batch.old_log_probs, masked, None, 1, gate=True)  # type: ignore[arg-type]
    assert found["mismatch/mean_w"] < found["alignment/mean_w"]


def test_auto_writes_down_what_it_took_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = batch_of([[0.0, 0.0], [0.0]], versions=[0, 0])
    apart = batch_of([[0.0, 0.0], [math.log(8.0)]], versions=[0, 0])
    auto = CorrectionConfig(CorrectionKind.auto)
    with open_monitor(tmp_path, RunnerConfig(), 3) as monitor:
        untouched, figures = apply_correction(same, auto, monitor, 1)
        assert untouched.policy_factors is None and figures["correction/kind"] == 0
        masked, figures = apply_correction(apart, auto, monitor, 2)
        again, _ = apply_correction(apart, auto, monitor, 3)
    assert masked.policy_factors is not None and again.policy_factors is not None
    assert masked.policy_factors.tolist() == [1.0, 1.0, 0.0]  # IcePop: 8 is above 5.
    assert figures["correction/rejected_tokens"] == pytest.approx(1 / 3)
    lines = [json.loads(x) for x in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [line["choice"] for line in lines] == ["none", "token_mask", "token_mask"]
    assert "effective sample size" in lines[1]["reason"]
    assert capsys.readouterr().out.count("takes token_mask") == 1


def test_weights_of_a_minibatch_are_those_of_the_whole_batch() -> None:
    batch = batch_of([[0.5, 0.1], [math.log(8.0)], [-0.2]], versions=[0, 0, 0])
    settings = CorrectionConfig(CorrectionKind.seq_truncate, veto_below=1e-4)
    found, _ = apply_correction(batch, settings, None, 1)  # type: ignore[arg-type]
    assert found.policy_factors is not None
    assert found.policy_factors.tolist() == pytest.approx(
        [math.exp(0.6)] * 2 + [2.0, math.exp(-0.2)]
    )
    part = found.select([2, 0]).policy_factors
    assert part is not None
    assert part.tolist() == found.policy_factors[[3, 0, 1]].tolist()


def test_every_number_of_the_losses_arrives() -> None:
    config = load(
        [
            *GIVEN,
            "algorithm.loss=dppo",
            "algorithm.loss_options.divergence=kl",
            "algorithm.loss_options.threshold=0.125",
            "algorithm.correction.off_policy_mask_kl=0.5",
        ]
    )
    objective = update_settings(config, kl_coef=0.0, entropy_coef=0.0).objective
    assert objective.loss_options == DppoOptions(Divergence.kl, threshold=0.125)
    assert objective.off_policy_mask_kl == 0.5
