"""Results of the checks for figures that only GPUs give, and for a driver's answers."""

import dataclasses
import json
import os
import stat
import subprocess

import numpy as np
import pytest
import torch

from rlmath.commands.plan.gpus import GPUS
from rlmath.commands.selfcheck import material, parts
from rlmath.commands.selfcheck.checks import actor, environment, parallel, sleep, training, update
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record, read_outcome
from rlmath.device import nvidia
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from rlmath.quickstart import make_tiny_model
from rlmath.types import Sample
from rlmath.validation.compare import comparison
from rlmath.validation.hf_log_probs import hf_log_probs

H100 = "NVIDIA H100 80GB HBM3"


def node(folder, gpus=8, **more):
    return dataclasses.replace(Node("cuda", gpus, H100, 80.0, "model", str(folder)), **more)


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "record.jsonl")


def outcome(tmp_path):
    return read_outcome(tmp_path / "record.jsonl")


def problems(tmp_path):
    return [one["problem"] for one in outcome(tmp_path).problems]


def fake_smi(folder, monkeypatch, **answers):
    """``nvidia-smi`` that answers by the beginning of its first argument."""
    cases = "".join(
        f"  --query-{key.replace('_', '-')}=*|{key}) cat <<'X'\n{text}\nX\n;;\n"
        for key, text in answers.items()
    )
    smi = folder / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\n')
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


TWO_GPUS = f"0, GPU-a, {H100}, 580.95.05, 81559, 4\n1, GPU-b, {H100}, 580.95.05, 81559, 9000"


def test_the_driver_is_read(tmp_path, monkeypatch):
    apps = "GPU-a, 11\nGPU-b, 12\nGPU-b, 13"
    fake_smi(tmp_path, monkeypatch, gpu=TWO_GPUS, compute_apps=apps, topo="\x1b[4mGPU0\x1b[0m NV18")
    first, second = nvidia.gpu_states()
    assert (first.uuid, first.driver, first.total_mib) == ("GPU-a", "580.95.05", 81559)
    assert (second.index, second.used_mib) == (1, 9000)
    assert nvidia.process_counts() == {"GPU-a": 1, "GPU-b": 2}
    assert nvidia.topology() == "GPU0 NV18\n"
    for visible in ("1", "GPU-b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [state.uuid for state in nvidia.gpu_states()] == ["GPU-b"]


def test_gpus_are_looked_at_before_this_process_uses_one(tmp_path, record, monkeypatch):
    order = []
    monkeypatch.setattr(nvidia, "gpu_states", lambda: order.append("GPUs") or [])
    monkeypatch.setattr(environment, "examine", lambda config: order.append("doctor") or [])
    monkeypatch.setattr(environment, "_versions", lambda record: None)
    environment.run(node(tmp_path), record)
    assert order == ["GPUs", "doctor"]


def test_cards_are_known_by_name(tmp_path):
    one = node(tmp_path, gpu_gib=93.6, gpu_name="NVIDIA H100 NVL")
    assert one.card == dataclasses.replace(GPUS["h100"], memory_gib=93.6)
    assert node(tmp_path, gpu_name="NVIDIA A100-SXM4-80GB").card is not None
    assert node(tmp_path, gpu_name="Tesla T4").card is None


def sample(*tokens):
    return Sample("p", 0, np.array(tokens), np.zeros(len(tokens)), "", "length", ((0, 0),), 0, 0)


@pytest.mark.parametrize(
    ("asleep", "expected"),
    [
        (lambda cycle: 20_000 + min(cycle, 3), ""),
        (lambda cycle: 20_000 + 10 * cycle, "grew by"),
        (lambda cycle: 35_000, "gave back 5000 MiB"),
    ],
)
def test_memory_of_sleeping_engines_is_flat(tmp_path, record, monkeypatch, asleep, expected):
    import contextlib
    from types import SimpleNamespace

    cycles = []
    pool = SimpleNamespace(sleep=lambda: cycles.append(len(cycles)))
    actor = SimpleNamespace(call=lambda function: ["GPU-a"])
    monkeypatch.setattr(sleep, "_used_mib", lambda gpu: asleep(len(cycles)) if cycles else 40_000)
    config = SimpleNamespace(rollout=SimpleNamespace(gpu_memory_utilization=0.3))
    # 80 GiB x 0.3 x 70 % = 17,203 MiB have to come back.
    monkeypatch.setattr(parts, "settings", lambda *a, **k: config)
    monkeypatch.setattr(parts, "start", lambda *a: contextlib.nullcontext((actor, pool)))
    monkeypatch.setattr(parts, "sample", lambda *a: [])
    monkeypatch.setattr(parts, "requests", lambda *a, **k: [])
    monkeypatch.setattr(sleep, "sync_weights", lambda *a, **k: None)
    sleep.run(node(tmp_path), record)
    assert len(cycles) == sleep.CYCLES
    assert bool(problems(tmp_path)) == bool(expected)
    assert expected in "".join(problems(tmp_path))


def test_an_update_is_held_to_its_plan(tmp_path, record):
    shape = model_spec(KNOWN[material.GPU_MODEL])
    card = node(tmp_path)
    # 16k tokens fit one GPU of 80 GiB with every activation kept, and not one of 64.
    assert update.least_recompute(shape, card, 16384).recompute_layers == 0
    smaller = dataclasses.replace(card, gpu_gib=64.0)
    planned = update.least_recompute(shape, smaller, 16384)
    assert 0 < planned.recompute_layers < shape.layers
    promised = update.planned_gib(shape, planned)
    # 4 x 16,384 tokens x 3 x 3.6 GFLOP at half of the card's peak.
    fast = update.Measured(16384, 1.5, 0.5, promised, 1.0)
    update.report(record, card, shape, fast, planned)
    assert problems(tmp_path) == []
    figures = {one["name"]: one["value"] for one in outcome(tmp_path).figures}
    assert figures["16384 tokens memory / plan"] == pytest.approx(1.0)
    assert 0.3 < figures["16384 tokens MFU"] < 0.9
    # With this constant the plan would have said 1.5 s.
    assert figures["plan: mfu"] == pytest.approx(0.4 / figures["16384 tokens time / plan"])
    assert figures["16384 tokens log-probs MFU"] == pytest.approx(figures["16384 tokens MFU"])
    # The plan's time is that of its MFU, with the recomputed layers on top.
    again = planned.recompute_layers / shape.layers / 3
    assert (1 + again) * figures["16384 tokens planned MFU"] == pytest.approx(0.4, rel=0.01)
    assert figures["16384 tokens planned log-probs MFU"] == pytest.approx(0.4, rel=0.01)
    slow = update.Measured(16384, 15.0, 5.0, 1.2 * promised, float("nan"))
    update.report(record, card, shape, slow, planned)
    norm, memory, late = problems(tmp_path)
    assert "norm is nan" in norm
    assert f"the plan says {promised:.1f}" in memory
    assert "the update took 15.00 s, 6." in late


@pytest.mark.parametrize(
    ("norm", "says"), [(1.0, ""), (1.015, ""), (1.03, "CP 2: "), (2.0, "CP 2: ")]
)
def test_gradient_norms_of_layouts_are_held_to_that_of_one_rank(tmp_path, record, norm, says):
    norms = {"one rank": 1.0, "DP 2": 1.001, "CP 2": norm}
    parallel.compare_norms(record, norms, parallel.MOST_DIFFERENCE["bfloat16"])
    assert len(problems(tmp_path)) == bool(says)
    assert says in "".join(problems(tmp_path))


def test_a_step_without_a_gradient_fails(tmp_path, record, monkeypatch):
    def train(command, check):
        run = tmp_path / training.RUN
        for folder in ("checkpoints", "hf"):
            (run / folder / "some").mkdir(parents=True)
        norms = ({"train/grad_norm": 0.5}, {"train/grad_norm": 0.0}, {})
        lines = [json.dumps({"step": step} | line) for step, line in enumerate(norms, start=1)]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(training.subprocess, "run", train)
    monkeypatch.setattr(training, "settings_of", lambda *given: [])
    monkeypatch.setattr(training, "STEPS", 3)
    training.run(node(tmp_path, 0, device="cpu"), record)
    assert problems(tmp_path) == [f"step {step}: the gradient's norm is 0.0" for step in (2, 3)]


def test_log_probs_beyond_the_limit_and_unfused_attention_fail(tmp_path, record):
    batch = material.random_batch(str(make_tiny_model(tmp_path / "m", num_layers=1)), [12, 9])
    ours = torch.full((int(batch.response_lengths.sum()),), -2.0)
    near, far = ours + 0.01, ours + 0.05
    actor.report(record, "TP 1", comparison(("a", "b"), ours, near, batch), "cuDNN (1)", 1.02)
    assert problems(tmp_path) == []
    actor.report(record, "CP 2", comparison(("a", "b"), ours, far, batch), actor.UNFUSED, 1.02)
    difference, unfused = problems(tmp_path)
    assert "CP 2" in difference
    assert "1.05" in difference
    assert "stores all scores" in unfused


def test_the_random_model_is_one_that_everything_reads(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
    small = {**KNOWN[material.GPU_MODEL], **sizes, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    monkeypatch.setitem(KNOWN, material.GPU_MODEL, small)
    folder = material.random_model(tmp_path / "model", on_cuda=True)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    batch = material.random_batch(str(folder), [20, 12])
    log_probs = hf_log_probs(folder, batch, 1.0)
    # Neither uniform (-ln 320 = -5.77 each) nor degenerate.
    assert 0.1 < float(log_probs.std()) < 2
    written = (folder / "model.safetensors").stat().st_mtime_ns
    material.random_model(tmp_path / "model", on_cuda=True)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
