"""The operators of a gated delta net against the recurrence and the convolution as they are written
in the paper (arXiv:2412.06464, equation 10), token by token in float64."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.device import delta_rule
from rlmath.device.delta_rule import CHUNK, causal_convolution, gated_delta_rule


def token_by_token(query, key, value, decay, beta):
    sharing = value.size(2) // key.size(2)
    query, key = (
        torch.nn.functional.normalize(x, dim=-1, eps=0).repeat_interleave(sharing, 2)
        for x in (query, key)
    )
    state = value.new_zeros(*value.shape[:1], value.size(2), key.size(-1), value.size(-1))
    outputs = []
    for t in range(value.size(1)):
        q, k, v, b = query[:, t], key[:, t], value[:, t], beta[:, t, :, None]
        state = state * decay[:, t, :, None, None].exp()
        state = state + (b * k)[..., None] * (v - (k[..., None] * state).sum(-2))[..., None, :]
        outputs.append((q[..., None] * state).sum(-2) * key.size(-1) ** -0.5)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 22])
def test_chunked_delta_rule_equals_the_recurrence_forward_and_backward(length):
    generator = torch.Generator().manual_seed(length)
    shapes = {"query": (2, 6), "key": (2, 6), "value": (4, 10), "decay": (4,), "beta": (4,)}
    given = {
        name: torch.randn(3, length, *shape, generator=generator) for name, shape in shapes.items()
    }
    given["decay"] = -given["decay"].abs() * 3
    given["beta"] = given["beta"].sigmoid()
    upstream = torch.randn(3, length, 4, 10, generator=generator)
    found = []
    for rule, dtype in ((gated_delta_rule, torch.float32), (token_by_token, torch.float64)):
        inputs = {name: x.to(dtype, copy=True).requires_grad_() for name, x in given.items()}
        out = rule(**inputs)
        out.backward(upstream.to(dtype))
        found.append([out.detach(), *(x.grad for x in inputs.values())])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=2e-5, rtol=1e-4)


def test_convolution_sees_its_last_tokens_alone():
    x, weight = torch.randn(2, 7, 3), torch.randn(3, 1, 4)
    out = causal_convolution(x, weight)
    for t in range(7):
        seen = [x[:, t - 3 + n] * weight[:, 0, n] for n in range(4) if t - 3 + n >= 0]
        torch.testing.assert_close(out[:, t], torch.nn.functional.silu(sum(seen)))


def test_a_gpu_without_the_kernels_says_which_package_has_them(monkeypatch):
    assert not delta_rule.takes_packs(torch.zeros(1))
    on_gpu = SimpleNamespace(is_cuda=True)
    # None, and one that has the package's other modules alone.
    for older in (lambda _: None, lambda name: None if "conv" in name else "found"):
        monkeypatch.setattr(delta_rule, "find_spec", older)
        delta_rule._has_kernels.cache_clear()
        with pytest.warns(UserWarning, match="pip install 'flash-linear-attention>=0.6'"):
            assert not delta_rule.takes_packs(on_gpu)
    monkeypatch.setattr(delta_rule, "find_spec", lambda _: "found")
    delta_rule._has_kernels.cache_clear()
    assert delta_rule.takes_packs(on_gpu)
    delta_rule._has_kernels.cache_clear()
