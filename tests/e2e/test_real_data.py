"""GSM8K's problems through the whole path."""

import os
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, metrics, rlmath

DATA = Path(os.environ.get("RLMATH_DATA_DIR", ROOT.parent / "shared" / "data"))


# The rows are read in tests/unit/data/test_data_real_files.py, the experiment's settings checked in
# tests/unit/checks/test_presets.py.
@pytest.mark.long
@pytest.mark.skipif(
    not (DATA / "gsm8k_train.jsonl").exists(),
    reason="needs gsm8k_train.jsonl in RLMATH_DATA_DIR; the project ships no one else's data",
)
def test_gsm8k_smoke(tmp_path):
    run = rlmath(
        "train",
        "experiment=gsm8k_smoke",
        f"data.train_paths=[{DATA / 'gsm8k_train.jsonl'}]",
        f"runner.run_dir={tmp_path}",
    )
    assert run.returncode == 0, run.stderr
    lines = metrics(tmp_path)
    assert lines[-1]["step"] == 2
    assert lines[-1]["alignment/mean_exp_abs_diff"] <= 1.0001
    assert "of 7,473 rows kept" in run.stdout
