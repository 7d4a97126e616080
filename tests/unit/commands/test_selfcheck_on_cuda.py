"""Each check on a node of GPUs, with ranks and engines that answer as real ones would:
its settings pass all checks of a run, and it passes."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlmath.checks.machine import Machine
from rlmath.cli import main
from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.checks import (
    alignment,
    checkpoint,
    engines,
    sleep,
    throughput,
    training,
    weight_sync,
)
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Outcome, Record, read_outcome
from rlmath.config.arithmetic import RunLayout, resolve_layout
from rlmath.config.schema import Config, Device
from rlmath.engines.protocol import Engine
from rlmath.model.published import KNOWN
from rlmath.quickstart import make_problems, make_tiny_model
from rlmath.training.engine_settings import engine_spec
from rlmath.types import Sample
from tests.unit.documented import write_model
from tests.unit.test_documented_commands import NODE

GPUS = [f"GPU-{letter}" for letter in "abcdefgh"]


class FakeActor:
    """Ranks whose weights change with every update, and that load what they saved."""

    def __init__(self, ranks):
        self._ranks = GPUS[:ranks]
        self._weights = self._saved = 0

    def call(self, function):
        if function is checkpoint.state_fingerprints:
            return [{"weight": self._weights} for _ in self._ranks]
        if function is checkpoint.peak_memory_gib:
            return [1.0 for _ in self._ranks]
        return list(self._ranks)

    def run_part(self, *arguments): ...

    def finish_step(self, *arguments):
        self._weights += 1
        return SimpleNamespace(policy=SimpleNamespace(minibatches=[{}]))

    def log_probs(self, batch, name="policy", seed=0):
        return batch.engine_log_probs + (0.0 if name == "policy" else 1e-3), None

    def weights_fingerprints(self, part=None):
        return {"a": self._weights, "b": self._weights}

    def save_checkpoint(self, folder):
        folder.mkdir()
        self._saved = self._weights

    def load_checkpoint(self, folder):
        self._weights = self._saved


class FakePool:
    """Engines on the first GPUs, each on as many as it has ranks."""

    bare_rate = 1.0

    def __init__(self, config, layout, trains):
        self.spec = engine_spec(config, layout, trains=trains)
        self.weights_version = 0
        width = layout.engine_tensor_parallel
        self._gpus = [GPUS[i * width : (i + 1) * width] for i in range(layout.engines)]
        self.sleeps = 0

    def sleep(self):
        self.sleeps += 1

    def ask(self, method):
        return self._gpus if method is Engine.gpus else [1000 for _ in self._gpus]

    def call_engines(self, function):
        return [{"same sampling": [self.bare_rate], "plain sampling": [self.bare_rate]}]

    def generate(self, wanted):
        for one in wanted:
            tokens = np.arange(one.max_tokens, dtype=np.int32)
            log_probs = np.full(one.max_tokens, -1.0, np.float32)
            spans = ((self.weights_version, 0),)
            yield Sample(
                one.problem_id, one.index, tokens, log_probs, "", "length", spans, one.seed, 0
            )


@dataclasses.dataclass
class Ran:
    """Run of a check."""

    outcome: Outcome
    configs: list[Config]
    layouts: list[RunLayout]
    pools: list[FakePool]


@pytest.fixture
def node(tmp_path, monkeypatch):
    write_model(tmp_path / "model", KNOWN["DeepSeek-R1-Distill-Qwen-1.5B"])
    monkeypatch.setattr(Machine, "here", lambda: NODE)
    folder = tmp_path / "check"
    folder.mkdir()
    return Node("cuda", 8, "NVIDIA H100 80GB HBM3", 80.0, str(tmp_path / "model"), str(folder))


def run(check, node, monkeypatch):
    ran = Ran(Outcome(), [], [], [])

    @contextlib.contextmanager
    def start(config, record, name=""):
        pool = make_pool(config, trains=True)
        yield FakeActor(ran.layouts[-1].actor.world_size), pool

    @contextlib.contextmanager
    def started_engines(config, record, name):
        yield make_pool(config, trains=False)

    def make_pool(config, trains):
        layout = resolve_layout(config, Device.cuda)
        pool = FakePool(config, layout, trains)
        ran.configs.append(config)
        ran.layouts.append(layout)
        ran.pools.append(pool)
        return pool

    def sync_weights(actor, pool, version, verification=None):
        assert version == pool.weights_version + 1
        pool.weights_version = version

    monkeypatch.setattr(parts, "start", start)
    monkeypatch.setattr(parts, "started_engines", started_engines)
    for module in (alignment, checkpoint, sleep, throughput, weight_sync):
        monkeypatch.setattr(module, "sync_weights", sync_weights)
    record = Record(Path(node.folder) / "record.jsonl")
    check.run(node, record)
    record.end()
    ran.outcome = read_outcome(Path(node.folder) / "record.jsonl")
    assert ran.outcome.status == "passed", ran.outcome.problems
    return ran


def test_selfcheck_of_alignment(node, monkeypatch):
    ran = run(alignment, node, monkeypatch)
    assert (ran.layouts[0].actor.world_size, ran.layouts[0].engines) == (1, 1)
    # Twice and three times the rounding noise, and engines that gave their memory back before each
    # update.
    limits = {one["limit"] for one in ran.outcome.figures if one["limit"]}
    assert limits == {"<= 1.002001", "<= 0.003"}
    assert ran.pools[0].sleeps == 2


def test_weight_sync_goes_both_ways(node, monkeypatch):
    ran = run(weight_sync, node, monkeypatch)
    assert [pool.spec.transport for pool in ran.pools] == ["ipc", "nccl"]
    assert [pool.weights_version for pool in ran.pools] == [3, 3]
    # The embeddings, 151,936 x 1,536 x 2 bytes, are larger than a bucket.
    figures = {one["name"]: one["value"] for one in ran.outcome.figures}
    assert figures["largest tensor"] == pytest.approx(445.1, abs=0.1)
    assert figures["bucket"] == ran.configs[0].weights.bucket_size_mib == 222
    alone = run(weight_sync, dataclasses.replace(node, gpus=1), monkeypatch)
    assert [pool.spec.transport for pool in alone.pools] == ["ipc"]


@pytest.mark.parametrize(
    ("gpus", "layouts"),
    [
        (8, [(4, 4, 1), (4, 4, 1), (4, 2, 2)]),
        (3, [(2, 2, 1), (2, 2, 1), (2, 1, 2)]),
        (1, [(1, 1, 1), (1, 1, 1)]),
    ],
)
def test_engines_take_up_to_four_gpus(node, monkeypatch, gpus, layouts):
    monkeypatch.setattr(engines, "process_counts", lambda: dict.fromkeys(GPUS[:gpus], 2))
    ran = run(engines, dataclasses.replace(node, gpus=gpus), monkeypatch)
    found = [(one.actor.world_size, one.engines, one.engine_tensor_parallel) for one in ran.layouts]
    assert found == layouts
    parts_left_out = [one["part"] for one in ran.outcome.not_applicable]
    assert parts_left_out == (["TP 2"] if gpus == 1 else [])


def test_selfcheck_of_engine_sleep(node, monkeypatch):
    pools = []
    monkeypatch.setattr(sleep, "_used_mib", lambda gpu: 20_000 if pools else 40_000)
    monkeypatch.setattr(FakePool, "sleep", lambda self: pools.append(1))
    ran = run(sleep, node, monkeypatch)
    assert ran.pools[0].spec.sleeps
    assert ran.pools[0].weights_version == sleep.CYCLES == len(pools)


def test_checkpoint_awake_and_asleep(node, monkeypatch):
    ran = run(checkpoint, node, monkeypatch)
    back = [one for one in ran.outcome.figures if one["name"].endswith("that came back")]
    assert [one["value"] for one in back] == ["2 of 2", "2 of 2"]
    assert ran.pools[0].sleeps == 2


def test_speed_of_what_engines_take_part_in(node, monkeypatch):
    ran = run(throughput, node, monkeypatch)
    (pool,) = ran.pools
    assert (ran.layouts[0].actor.world_size, pool.spec.transport) == (1, "ipc")
    assert pool.spec.async_scheduling
    assert not pool.spec.enforce_eager
    # Three syncs; the engine gives its memory back before the checkpoint alone.
    assert (pool.weights_version, pool.sleeps) == (3, 1)
    names = {one["name"] for one in ran.outcome.figures}
    assert {"planned decoding", "planned weight sync", "checkpoint rate"} <= names


def test_an_engine_slower_than_vllm_alone_fails(node, monkeypatch):
    monkeypatch.setattr(FakePool, "bare_rate", 1e12)
    with pytest.raises(AssertionError, match="of what vLLM gives alone"):
        run(throughput, node, monkeypatch)


@pytest.mark.parametrize(("gpus", "used"), [(8, 8), (3, 2), (1, 1)])
def test_settings_of_the_training_pass_the_checks(node, monkeypatch, gpus, used):
    machine = dataclasses.replace(NODE, gpus=gpus)
    monkeypatch.setattr(Machine, "here", lambda: machine)
    folder = Path(node.folder)
    make_tiny_model(folder / "model")
    make_problems(folder / "data", num_train=16, num_eval=4, num_sft=0)
    (folder / "reward.py").write_text(training.REWARD, encoding="utf-8")
    settings = training.settings_of(dataclasses.replace(node, gpus=gpus), folder)
    assert f"cluster.gpus_per_node={used}" in settings
    assert "model.dtype=bfloat16" in settings
    assert main(["train", *settings, "--check"]) == 0
