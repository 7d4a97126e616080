"""A run whose engines sample in FP8, from the command line."""

import pytest

from tests.e2e.runs import metrics, quickstart_settings, rlmath

pytestmark = pytest.mark.long


@pytest.mark.parametrize("what", ["rollout.quantization", "rollout.kv_cache_dtype"])
def test_engines_sample_in_fp8_and_the_gate_judges_them_by_it(material, tmp_path, what):
    settings = [
        *quickstart_settings(material, tmp_path),
        "model.dtype=bfloat16",
        f"{what}=fp8",
        "actor.optimizer.lr=1e-3",
        "algorithm.entropy_coef=0.1",
        "weights.verify_every=1",
        "eval.every=0",
    ]
    run = rlmath("train", *settings, "--check")
    assert run.returncode != 0 and "token_truncate" in run.stderr
    settings.append("algorithm.correction.kind=token_truncate")
    run = rlmath("train", *settings)
    assert run.returncode == 0, run.stderr
    first, second = (line for line in metrics(tmp_path) if line["step"] > 0)
    # FP8 rounds far more than bfloat16, and the engine is as far away as that.
    plain, noise = (first[f"alignment/{name}noise_excess"] for name in ("unquantized_", ""))
    assert 0 < 4 * plain < noise
    assert 0.3 < first["alignment/noise_ratio"] <= 2
    for line in (first, second):
        assert line["train/grad_norm"] > 0 and line["alignment/mean_exp_abs_diff"] > 1 + 2 * plain
