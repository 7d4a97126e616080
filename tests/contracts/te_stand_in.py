"""Classes with the names, constructor arguments and parameters of Transformer Engine's layers.

Megatron's extension subclasses them, so that what it builds can be seen without CUDA. Products
and norms compute, for what is in FP8 (``te_stand_in_fp8.py``); attention gives its queries.
That Transformer Engine's own have these arguments, attributes and parameters is asserted
against the real package in ``tests/cuda_wheels/``.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contracts.te_stand_in_fp8 import (
    NAMES,
    FP8GlobalStateManager,
    product_weight,
    round_to_fp8,
)

VERSION = "2.11.0"
NAME = "transformer_engine"


class _Products(nn.Module):
    """Base of all products; weights are split as ``parallel_mode`` says."""

    def __init__(
        self,
        in_features,
        out_features,
        *,
        bias,
        params_dtype,
        device="cpu",
        tp_size=1,
        tp_group=None,
        sequence_parallel=False,
        parallel_mode=None,
        fuse_wgrad_accumulation=False,
        init_method=None,
        return_bias=False,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        **_,
    ):
        super().__init__()
        self._fp8_workspaces: dict[str, Tensor] = {}
        self.save_original_input = False
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.sequence_parallel = sequence_parallel
        self.parallel_mode = parallel_mode
        out = out_features // tp_size if parallel_mode == "column" else out_features
        into = in_features // tp_size if parallel_mode == "row" else in_features
        self._parts = {"dtype": params_dtype, "device": device}
        self._make(out, into)
        if bias:
            self.bias = self._parameter(out)

    def _parameter(self, *shape):
        made = nn.Parameter(torch.empty(*shape, **self._parts))
        if self.parallel_mode in ("column", "row"):
            made.tensor_model_parallel = True
        return made

    def _make(self, out, into):
        self.weight = self._parameter(out, into)

    def forward(self, x, is_first_microbatch=None):
        rows = x.numel() // x.size(-1)
        weight = product_weight(self, self.weight, rows, is_first_microbatch)
        if FP8GlobalStateManager.is_fp8_enabled():
            x = round_to_fp8(x)
        return F.linear(x, weight, getattr(self, "bias", None))


class Linear(_Products): ...


class LayerNormLinear(_Products):
    def __init__(self, *args, normalization, eps, **kwargs):
        super().__init__(*args, **kwargs)
        assert normalization == "RMSNorm"
        norm = nn.Parameter(torch.empty(self.weight.size(1), **self._parts))
        norm.sequence_parallel = self.sequence_parallel
        self.layer_norm_weight, self.eps = norm, eps

    def forward(self, x, is_first_microbatch=None):
        normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Products):
    def __init__(self, num_gemms, *args, **kwargs):
        self._num_gemms = num_gemms
        super().__init__(*args, **kwargs)

    def __setattr__(self, name, value):
        # Set before nn.Module's own attributes are there.
        object.__setattr__(self, name, value) if name == "_num_gemms" else super().__setattr__(
            name, value
        )

    def _make(self, out, into):
        for index in range(self._num_gemms):
            self.register_parameter(f"weight{index}", self._parameter(out, into))


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size,
        eps,
        sequence_parallel,
        params_dtype,
        zero_centered_gamma=False,
        device="cpu",
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups,
        attn_mask_type,
        cp_group=None,
        cp_comm_type="p2p",
        **_,
    ):
        super().__init__()
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(self, query, *_, **__):
        return query.flatten(-2)


LAYERS = {
    one.__name__: one
    for one in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)
}


# In no Transformer Engine 2; see OPTIONAL in tests/cuda_wheels/test_te_names.py.
ABSENT = ("_SplitAlongDim",)


class _Module(types.ModuleType):
    """Any name that is asked for: a layer of above, else a class or function that does nothing."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = VERSION

    def __getattr__(self, name):
        if name.startswith("__") or name in ABSENT:
            raise AttributeError(name)
        if name in LAYERS:
            return LAYERS[name]
        if name in NAMES:
            return NAMES[name]
        if name[0].isupper():
            return type(name, (torch.optim.AdamW,) if name.startswith("Fused") else (), {})
        return _Module(f"{self.__name__}.{name}")

    def __call__(self, *_, **__):
        """A function; a pair is what Megatron's callers unpack where they use the result."""
        return None, None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        top, last = name.partition(".")[0], name.rpartition(".")[2]
        if top not in (NAME, f"{NAME}_torch") or last in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        """There is nothing to run; a submodule is an attribute of its parent."""


def install():
    """Let this process import the fake. Before Megatron is imported."""
    assert not any(name.startswith("megatron") for name in sys.modules)
    sys.meta_path.insert(0, _Finder())
