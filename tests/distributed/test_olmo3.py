"""OLMo-3's block on real gloo ranks: norms behind attention and feed-forward, and norms of queries
and keys over all heads, of which tensor ranks have shares, which are OLMo-2's; windows in three of
four layers, and another rotary embedding in the fourth."""

import pytest
import torch

from rlmath.model.parallel import Layout
from tests.support.models import TINY_SIZES, build, windowed_ropes, yarn
from tests.support.resumed_runs import assert_close, changes_of, commit, run_load, run_save

ONE, TP2 = Layout(1, 1, 1), Layout(2, 1, 1)
# Sequences have 4 to 37 tokens.
WINDOW = 6
ROPES = windowed_ropes(yarn(16, 16.0, rope_theta=500000.0, beta_fast=4), 1000.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("olmo3")
    olmo = build("olmo3", **TINY_SIZES, sliding_window=WINDOW, rope_parameters=ROPES)
    with torch.no_grad():
        for name, parameter in olmo.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    olmo.save_pretrained(folder)
    return str(folder)


def test_a_checkpoint_of_two_tensor_ranks_resumes_with_one(ranks, model, tmp_path):
    changes = changes_of(True)
    straight, folder = commit(
        tmp_path, lambda partial: ranks.run(TP2, run_save, model, changes, partial, 2, 2)
    )
    (resumed,) = ranks.run(ONE, run_load, model, changes, folder, 2)
    assert_close(resumed, straight[0])
