"""What Megatron does where Transformer Engine is not installed, as on CPU."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")


def test_without_transformer_engine_fp8_is_no_error_and_nothing():
    """Why actor.fp8 refuses Megatron's own layers itself (rlmath/actor/fp8.py)."""
    from megatron.core import fp8_utils

    assert not fp8_utils.HAVE_TE
    wanted = SimpleNamespace(fp8="e4m3", fp8_recipe="blockwise")
    assert fp8_utils.get_fp8_recipe(wanted) is None, "actor.fp8 may be had with local layers"
    with fp8_utils.get_fp8_context(wanted) as context:
        assert context is None


def test_recomputed_norms_ask_for_fp8_whatever_they_are_told():
    from megatron.core.tensor_parallel.random import HAVE_TE, CheckpointWithoutOutput

    assert not HAVE_TE
    assert CheckpointWithoutOutput(fp8=False).fp8, "layernorm may be recomputed without TE"
