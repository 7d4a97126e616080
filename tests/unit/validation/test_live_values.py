import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlmath.config.actor import ActorConfig, Fp8
from rlmath.config.rollout import KvCacheDtype, Quantization, RolloutConfig
from rlmath.engines.engine import RolloutEngine
from rlmath.engines.layer_values import EMBEDDING, HEAD, NORM, noted_values, watch
from rlmath.errors import UserError
from rlmath.model.spec import model_spec
from rlmath.model.tiny import tiny_config
from rlmath.training import live_divergence
from rlmath.validation.convert import model_of_run, read_checkpoint
from rlmath.validation.engine_values import engine_values, together
from rlmath.validation.find_divergence import LEAST_NOISE, beyond_rounding

TOKENS, WIDTH = 6, 8
SPEC = model_spec(tiny_config(num_layers=2))


class Qkv(nn.Module):
    """One worker's rows of query, key and value: two of four heads, and one of two key heads."""

    num_heads, num_kv_heads, head_size, num_kv_head_replicas, tp_rank = 2, 1, 2, 1, 0

    def forward(self, x):
        return torch.arange(8.0).expand(len(x), 8) + 100 * self.tp_rank, None


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


class LogitsProcessor(Doubling):
    pass


class Model(nn.Module):
    """A model with vLLM's names and layers."""

    def __init__(self, rank=0):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens, self.model.norm = Doubling(), Doubling()
        layer = nn.Module()
        layer.input_layernorm, layer.self_attn, layer.mlp = Doubling(), nn.Module(), Doubling()
        layer.self_attn.qkv_proj, layer.self_attn.o_proj = Qkv(), Doubling()
        layer.self_attn.qkv_proj.tp_rank = rank
        layer.mlp.gate_up_proj = Doubling()
        self.model.layers = nn.ModuleList([layer])
        self.logits_processor = LogitsProcessor()

    def forward(self, x):
        layer = self.model.layers[0]
        x = self.model.embed_tokens(x)
        layer.input_layernorm(x)
        layer.self_attn.qkv_proj(x)
        layer.self_attn.o_proj(x)
        layer.mlp.gate_up_proj(x)
        layer.mlp(x)
        self.logits_processor(self.model.norm(x)[-1:])


def worker_of(model):
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))


class Engine:
    """vLLM's ``LLMEngine`` with one request at most."""

    def __init__(self, models, busy):
        self.models, self.left = models, int(busy)
        self.salts: list[str] = []

    def has_unfinished_requests(self):
        return self.left > 0

    def add_request(self, name, prompt, params):
        assert (params.max_tokens, params.temperature) == (1, 0.0)
        self.salts.append(prompt["cache_salt"])
        self.left, self.tokens = 1, prompt["prompt_token_ids"]

    def step(self):
        self.left = 0
        x = torch.tensor(self.tokens).float()[:, None].expand(-1, WIDTH)
        for model in self.models:
            for part in x.split(4):  # A long prompt comes in pieces.
                model(part)


def pool_of(models, busy=False):
    workers, engine = [worker_of(model) for model in models], Engine(models, busy)
    made = RolloutEngine.__new__(RolloutEngine)
    made._loop = SimpleNamespace(
        rpc=lambda function: [function(worker) for worker in workers],
        engine_call=lambda function: function(engine),
    )
    return SimpleNamespace(ask=lambda _, tokens: [made.layer_values(tokens)], engine=engine)


@pytest.mark.process
def test_the_engines_values_are_whole():
    models = [Model(0), Model(1)]
    pool = pool_of(models)
    values = engine_values(pool, list(range(TOKENS)), 1)
    x = 2 * torch.arange(float(TOKENS))[:, None].expand(-1, WIDTH)
    assert torch.equal(values[-1, EMBEDDING], x)
    assert torch.equal(values[0, "input_norm"], 2 * x)
    assert values[0, "q"][3].tolist() == [0, 1, 2, 3, 100, 101, 102, 103]
    assert values[0, "k"][5].tolist() == [4, 5, 104, 105]
    assert values[0, "v"].shape == (TOKENS, 4)
    assert torch.equal(values[0, "attention"], torch.cat([x, x], 1))
    assert torch.equal(values[0, "attention_out"], 2 * x)
    assert values[0, "gate"].shape == values[0, "up"].shape == (TOKENS, WIDTH)
    assert torch.equal(values[0, "mlp"], 2 * x)
    assert torch.equal(values[1, NORM], 2 * x)
    assert torch.equal(values[1, HEAD], 4 * x[-1:])
    # No hook stays, and no prefix is shared with another request.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in models[0].modules())
    again = engine_values(pool, list(range(TOKENS)), 1)
    assert again is not None and len(set(pool.engine.salts)) == 2


def test_an_engine_with_requests_is_left_alone():
    model = Model()
    pool = pool_of([model], busy=True)
    assert engine_values(pool, [1, 2], 1) is None
    assert not pool.engine.salts
    assert not any(m._forward_hooks for m in model.modules())


def test_key_heads_on_several_workers_count_once():
    noted = []
    for rank in range(2):
        model = Model(rank)
        model.model.layers[0].self_attn.qkv_proj.num_kv_head_replicas = 2
        worker = worker_of(model)
        watch(worker)
        model(torch.ones(3, WIDTH))
        noted.append(noted_values(worker))
    values = together(noted)
    assert values[0, "q"].shape == (3, 8) and values[0, "k"].shape == (3, 2)


def values_of(**changes):
    """Values of two layers; ``changes``: what is added to a step of layer 1."""
    values = {}
    for layer in range(2):
        for step in ("input_norm", "q", "attention", "mlp"):
            by = changes.get(step, 0.0) if layer == 1 else 0.0
            values[layer, step] = torch.ones(4, 3) + by
    values[2, HEAD] = torch.ones(4, 5) + changes.get("head", 0.0)
    return values


NOISY = values_of(input_norm=1e-3, q=1e-3, attention=1e-3, mlp=1e-3, head=1e-3)


def test_the_first_value_beyond_rounding_is_named():
    ours = values_of()
    first, worst = beyond_rounding(ours, NOISY, values_of(q=2e-3), SPEC, 6.0)
    assert first is None and worst.ratio == pytest.approx(2.0, rel=1e-3)
    assert "q_proj" in worst.place and worst.place.startswith("layer 1")
    first, _ = beyond_rounding(ours, NOISY, values_of(q=2e-3, attention=0.1, mlp=1.0), SPEC, 6.0)
    assert first is not None and first.ratio == pytest.approx(100, rel=1e-2)
    assert first.place.startswith("layer 1, rotary embedding")
    first, _ = beyond_rounding(ours, NOISY, values_of(mlp=float("nan")), SPEC, 6.0)
    assert first is not None and "down_proj" in first.place
    # Without noise, what float32 kernels differ by.
    first, _ = beyond_rounding(ours, ours, values_of(q=3 * LEAST_NOISE), SPEC, 6.0)
    assert first is None
    # An engine has the last row of the logits.
    theirs = values_of()
    theirs[2, HEAD] = torch.full((1, 5), 1.5)
    first, _ = beyond_rounding(ours, NOISY, theirs, SPEC, 6.0)
    assert first is not None and first.place == HEAD


def session_of(theirs, **changes):
    spec = {"device": "cpu", "enforce_eager": False, "adapters": None} | changes
    config = SimpleNamespace(
        rollout=changes.get("rollout", RolloutConfig()),
        actor=changes.get("actor", ActorConfig()),
        model=SimpleNamespace(path="tiny"),
    )
    return SimpleNamespace(
        config=config,
        layout=SimpleNamespace(actor=SimpleNamespace(context_parallel=changes.get("cp", 1))),
        sampling=SimpleNamespace(pool=SimpleNamespace(spec=SimpleNamespace(**spec))),
        actor=SimpleNamespace(
            call=lambda job: [values_of() if job.noise_seed is None else NOISY, None]
        ),
        theirs=theirs,
    )


@pytest.mark.parametrize(
    ("theirs", "changes", "said"),
    [
        (values_of(attention=0.1), {}, "They diverge first in layer 1, rotary embedding"),
        (values_of(), {}, "Values in all layers agree on the first 2 tokens"),
        (None, {}, "the engines are sampling"),
        (values_of(), {"device": "cuda"}, "rollout.enforce_eager=true"),
        (values_of(), {"cp": 2}, "context-parallel"),
        (values_of(), {"adapters": object()}, "adapters apart"),
        (values_of(), {"rollout": RolloutConfig(quantization=Quantization.fp8)}, "in FP8"),
        (values_of(), {"rollout": RolloutConfig(kv_cache_dtype=KvCacheDtype.fp8)}, "in FP8"),
        (values_of(), {"actor": ActorConfig(fp8=Fp8.hybrid)}, "in FP8"),
    ],
)
def test_failed_gate_reports_the_divergence_point(monkeypatch, theirs, changes, said):
    monkeypatch.setattr(live_divergence, "engine_values", lambda pool, tokens, layers: theirs)
    assert said in live_divergence.where_they_part(session_of(theirs, **changes), [1, 2])


def test_error_in_find_divergence_does_not_hide_the_failure(monkeypatch):
    def raise_error(*_):
        raise RuntimeError("an engine died\nwith a traceback")

    monkeypatch.setattr(live_divergence, "engine_values", raise_error)
    said = live_divergence.where_they_part(session_of(None), [1, 2])
    assert "RuntimeError: an engine died)" in said and "rlmath validate" in said


def test_the_model_of_a_run_is_found_from_its_settings(tmp_path):
    model = tmp_path / "model"
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    (checkpoint / "actor").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.yaml above .*model\.path="):
        model_of_run(checkpoint)
    (tmp_path / "run" / "config.yaml").write_text(f"model:\n  path: {model}\n")
    with pytest.raises(
        UserError, match=r"names the model .*, which is not there now.*model\.path="
    ):
        model_of_run(checkpoint)
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert model_of_run(checkpoint) == model
    assert model_of_run(checkpoint / "actor") == model


def test_a_checkpoint_says_what_it_is(tmp_path):
    with pytest.raises(UserError, match=r"is no checkpoint.*runs/<run>/checkpoints/step_000050"):
        read_checkpoint(tmp_path)
    about = {"shape": {"layers": 2}, "dtype": "bfloat16", "layout": {"tensor_parallel": 4}}
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "about.json").write_text(json.dumps(about))
    saved = read_checkpoint(tmp_path)
    assert str(saved.dtype) == "torch.bfloat16"
    assert saved.layout == {"tensor_parallel": 4}
    assert read_checkpoint(tmp_path / "actor") == saved
