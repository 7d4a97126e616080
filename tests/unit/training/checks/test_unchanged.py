import pytest

from rlmath.config.load import load
from rlmath.config.schema import DType
from rlmath.device import CPU
from rlmath.device.residue import Residue
from rlmath.errors import UserError
from rlmath.training.checks.base import InvariantError
from rlmath.training.checks.residue import ACTOR, GIB, HOST, OTHERS, OVERLAPPED, LeftoverMemory
from rlmath.training.checks.unchanged import check_changes, check_value_changes, unchanged_parts
from rlmath.training.metrics import memory_by_phase
from rlmath.weights.gather import WeightChanges
from rlmath.weights.runs import Run

UP = Run("model.layers.1.mlp.up_proj.weight", 0, 64, (64, 128))
UPDATE = {"train/lr": 1e-5, "train/grad_norm": 0.5, "train/discarded_minibatches": 0.0}


def changes(*unchanged):
    return [WeightChanges({}, one) for one in unchanged]


def check(found, *overrides, **update):
    config = load(["experiment=quickstart", *overrides])
    metrics = UPDATE | {f"train/{key}": value for key, value in update.items()}
    monitor = None
    check_changes(config, found, metrics, 3, monitor)


def test_a_half_updated_rank_is_named():
    with pytest.raises(InvariantError, match=r"step 3: .*up_proj\.weight on rank 1 \(rows 64 to"):
        check(changes((), (UP,)))


def test_a_frozen_layer_names_its_tensors():
    runs = tuple(Run(f"model.layers.0.{i}.weight", 1, 0, (128, 64)) for i in range(5))
    with pytest.raises(InvariantError, match=r"0\.0\.weight on rank 0 \(columns .* and 2 more"):
        check(changes(runs, None))


def test_steps_without_an_update_are_not_judged():
    stuck = changes((UP,), (UP,))
    check(stuck, lr=0.0)
    check(stuck, grad_norm=0.0)
    check(stuck, discarded_minibatches=2.0)
    check(changes(None, None))
    check_changes(load(["experiment=quickstart"]), stuck, {}, 3, None)


def test_under_lora_what_has_an_adapter_is_judged():
    """The base model is frozen on purpose, and of an MoE the feed-forward may have no adapter."""
    query = Run("model.layers.1.self_attn.q_proj.weight", 0, 64, (64, 128))
    lora = "actor.lora.rank=4"
    check(changes((UP,), None), lora)
    check(changes((query,)), lora, lr=5e-7)
    check(changes((query,)), lora, "actor.lora.layers=[0]")
    check(changes((query,)), lora, "actor.lora.targets=[up_proj]")
    with pytest.raises(InvariantError, match=r"q_proj\.weight on rank 0"):
        check(changes((UP, query)), lora)
    with pytest.raises(InvariantError, match=r"bit of model\.layers\.1\.mlp\.up_proj"):
        check(changes((UP, query)), lora, "actor.lora.targets=[up_proj]")


def test_a_frozen_layer_of_the_value_model_names_its_tensors():
    def judge(*unchanged, dtype="float32", **update):
        figures = {"lr": 1e-6, "grad_norm": 0.5, "discarded_minibatches": 0.0} | update
        config = load(["experiment=quickstart", f"model.dtype={dtype}"])
        metrics = {f"value/{key}": value for key, value in figures.items()}
        monitor = None
        check_value_changes(config, unchanged, metrics, 3, monitor)

    stuck = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(InvariantError, match=r"bit of the value model's model\.layers\.0\."):
        judge("model.embed_tokens.weight", stuck)
    judge("model.embed_tokens.weight", "model.norm.weight", "value_head.bias")
    judge("model.layers.0.mlp.experts.1.up_proj.weight")
    for still in ({"lr": 0.0}, {"grad_norm": 0.0}, {"discarded_minibatches": 2.0}):
        judge(stuck, **still)
    judge(stuck, dtype="bfloat16")


def test_parts_that_a_right_update_leaves_alone():
    left = (
        Run("model.embed_tokens.weight", 0, 0, (4096, 128)),
        Run("model.layers.0.mlp.experts.3.up_proj.weight", 0, 0, (128, 128)),
        Run("model.norm.weight", 0, 0, (4096,)),
        Run("model.layers.0.small.weight", 0, 0, (8, 8)),
    )
    assert unchanged_parts(DType.float32, [left]) == []
    medium = Run("model.layers.0.medium.weight", 0, 0, (32, 32))
    assert unchanged_parts(DType.float32, [(medium,)])
    assert unchanged_parts(DType.bfloat16, [(medium,)]) == []
    large = Run("model.layers.0.large.weight", 0, 0, (128, 128))
    assert unchanged_parts(DType.bfloat16, [(large,)], 2e-5)
    assert unchanged_parts(DType.bfloat16, [(large,)], 1e-6) == []
    assert unchanged_parts(DType.float32, [(large,)], 1e-6)


def ranks(*gib, others=None):
    beside = None if others is None else int(others * GIB)
    return [Residue(int(one * GIB), int(10 * GIB), beside) for one in gib]


def test_the_fullest_rank_is_logged():
    check = LeftoverMemory()
    found = check.compare(ranks(1.0, 1.5), ranks(5.0, others=3.0), False, 1.0)
    assert found == {ACTOR: 1.5, HOST: 10.0, OTHERS: 3.0, OVERLAPPED: 0.0}
    found = LeftoverMemory().compare(ranks(1.0), ranks(1.0), False, 1.0)
    assert found.keys() == {ACTOR, HOST, OVERLAPPED}
    assert LeftoverMemory().compare([], [], False, 1.0) == {}, "nothing is offloaded"


def test_growth_above_the_limit_stops_the_run_with_the_numbers():
    check = LeftoverMemory()
    for gib in (1.0, 1.5, 2.0):
        check.compare(ranks(0.5, gib), [], False, 1.0)
    with pytest.raises(UserError, match=r"2\.25 GiB, which is 1\.25 above the 1\.00 GiB"):
        check.compare(ranks(0.5, 2.25), [], False, 1.0)
    with pytest.raises(UserError, match=r"sleeping engines .* 4\.50 GiB.*growth_gib=1"):
        check.compare(ranks(1.0), ranks(1.0, others=3.0), False, 1.0)
        check.compare(ranks(1.0), ranks(1.0, others=4.5), False, 1.0)


def test_memory_by_phase():
    assert memory_by_phase({"update": 3 * 2**30}) == {"memory/update_peak_gib": 3.0}


def test_the_peak_since_the_last_call():
    """A phase's memory is its own, and the process's highest is not forgotten."""
    CPU.take_peak_bytes()
    taken = bytearray(b"x" * 2**26)
    taken.clear()
    high = CPU.take_peak_bytes()
    low = CPU.take_peak_bytes()
    assert high - low >= 2**25
    assert CPU.peak_memory_gib() * 2**30 >= high
