"""Transformer Engine itself in the models, on meta tensors, and what is read in its source.

What the extension of Megatron builds of its fake is asserted in the plain suite
(``tests/contracts/test_transformer_engine.py``); here the same is asserted of the real one.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.utils import transformer_engine as te_install
from tests.contracts.te_expected import MODULES, check


def run(*arguments):
    """The last line that Python prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | {"NVTE_FRAMEWORK": "pytorch"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def layers():
    found = json.loads(run("-m", "tests.contracts.te_layers_program", "installed"))
    return found


def test_transformer_engine_is_installed_completely():
    assert te_install.missing_part() is None
    program = "from rlmath.utils import transformer_engine as t; print(t.import_error())"
    assert run("-c", program) == "None"


@pytest.mark.parametrize("case", MODULES)
def test_megatron_builds_its_layers(layers, case):
    check(case, layers[case], marks=False)


def test_batch_invariance_without_flash_attention_is_refused():
    """The lock has no flash-attn: compiling it takes hours, and nothing else would use it."""
    program = (
        "from rlmath.device.batch_invariant import enable_batch_invariance\n"
        "from rlmath.errors import UserError\n"
        "import torch\n"
        "try: enable_batch_invariance()\n"
        "except UserError as error: print(error, torch.are_deterministic_algorithms_enabled())"
    )
    said = run("-c", program)
    assert "precision.batch_invariant=true" in said and said.endswith("False")


def source(module):
    """Without importing it."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "pytorch" / f"{module}.py").read_text()


def function(module, owner, name):
    """A function of a module (``owner`` empty) or a method of one of its classes."""
    tree = ast.parse(source(module))
    if owner:
        tree = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner)
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("module/linear", "Linear"),
        ("module/layernorm_linear", "LayerNormLinear"),
        ("module/grouped_linear", "GroupedLinear"),
    ],
)
def test_the_forward_pass_reads_whether_gradients_are_fused(module, layer):
    """``accumulate_into_main_grads`` sets the attribute after the layer was made."""
    forward = ast.unparse(function(module, layer, "forward"))
    assert "self.fuse_wgrad_accumulation" in forward
    text = source(module)
    assert "grad_added_to_main_grad = True" in text
    # A step's first micro-batch overwrites: the buffer is 0 then, and stays unread.
    assert "ctx.fuse_wgrad_accumulation and not ctx.is_first_microbatch" in text


def test_norms_tell_megatron_that_their_gradients_are_partial():
    """Under sequence parallelism; lost on meta tensors, so read here."""
    text = ast.unparse(function("module/rmsnorm", "RMSNorm", "reset_parameters"))
    assert "self.weight.sequence_parallel = self.sequence_parallel" in text


def test_attention_does_not_wait_for_the_gpu():
    """Lengths that only stand in tensors would be fetched from the GPU in every layer."""
    text = ast.unparse(
        function(
            "attention/dot_product_attention/dot_product_attention",
            "DotProductAttention",
            "forward",
        )
    )
    assert "cu_seqlens_q_padded is not None and (not torch.equal(" in text
    assert "if max_seqlen_q is None" in text


def test_te_names_for_batch_invariance_exist():
    arguments = [a.arg for a in function("cpp_extensions/gemm", "", "general_gemm").args.args]
    assert arguments[:3] == ["A", "B", "out_dtype"]
    assert {"accumulate", "layout", "out", "bias", "grad", "ub", "ub_type"} <= set(arguments)
    utils = source("attention/dot_product_attention/utils")
    for name in ("is_installed", "v3_is_installed", "version_required", "max_version"):
        assert f"    {name} = " in utils
    assert "general_gemm" in source("module/linear")
    init = ast.unparse(
        function(
            "attention/dot_product_attention/dot_product_attention",
            "DotProductAttention",
            "__init__",
        )
    )
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO" in init
    # The norm inside LayerNormLinear goes by another name than those that Megatron replaces.
    assert "apply_normalization" in source("module/layernorm_linear")
    assert "def rmsnorm" not in source("module/layernorm")


def test_adam_is_fused():
    assert "class FusedAdam" in source("optimizers/fused_adam")


def test_attention_says_which_backend_it_took():
    """``rlmath selfcheck gpu`` reports it."""
    text = source("attention/dot_product_attention/dot_product_attention")
    assert "\n_attention_backends = {" in text
    for which in ("flash", "fused", "unfused"):
        key = f'_attention_backends["use_{which}_attention"]'
        assert f"{key} = use_{which}_attention" in text
    # The order in which it takes them.
    assert text.index("if use_flash_attention:") < text.index("if use_fused_attention:")
