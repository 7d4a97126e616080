import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.config.arithmetic import Batch, batch_of, describe, resolve_layout
from rlmath.config.load import load
from rlmath.config.schema import Device
from rlmath.errors import ConfigError


def settings_with(*overrides):
    return load(["model.path=m", "runner.run_dir=r", *overrides])


def layout_of(device, *overrides):
    return resolve_layout(settings_with(*overrides), device)


def test_cpu_defaults_to_one_copy_and_one_engine():
    layout = layout_of(Device.cpu, "actor.tensor_parallel=2", "actor.pipeline_parallel=2")
    assert (layout.actor.data_parallel, layout.engines, layout.accelerators) == (1, 1, 0)
    assert layout.actor.world_size == 4
    layout = layout_of(Device.cpu, "actor.data_parallel=3", "rollout.engines=2")
    assert (layout.actor.world_size, layout.engine_ranks) == (3, 2)


def test_colocated_actor_and_engines_each_take_all_gpus():
    layout = layout_of(
        Device.cuda, "cluster=gpu16x8", "actor.tensor_parallel=4", "rollout.tensor_parallel=2"
    )
    assert (layout.accelerators, layout.actor.data_parallel, layout.engines) == (128, 32, 64)


@pytest.mark.parametrize(
    "given_overrides", [("rollout.engines=4",), ("actor.data_parallel=2",)], ids=str
)
def test_separate_gpus_are_divided_by_what_is_given(given_overrides):
    layout = layout_of(
        Device.cuda,
        "cluster=gpu8",
        "cluster.placement=separate",
        "actor.tensor_parallel=2",
        *given_overrides,
    )
    assert (layout.actor.data_parallel, layout.engines) == (2, 4)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.tensor_parallel=3"], ["8 / 3 is no whole number", "one of 1, 2, 4, 8"]),
        (["actor.tensor_parallel=16"], ["8 / 16 is no whole number", "one of 1, 2, 4, 8"]),
        (["actor.data_parallel=9"], ["1 GPUs a copy x data_parallel 9 = 9 GPUs", "there are"]),
        (["rollout.engines=9"], ["the engines 9 x tensor_parallel 1 = 9"]),
        (["cluster.placement=separate"], ["give actor.data_parallel or rollout.engines"]),
        (
            ["cluster.placement=separate", "actor.data_parallel=5", "rollout.engines=4"],
            ["= 5 GPUs", "= 4, together"],
        ),
        (["cluster.placement=separate", "actor.data_parallel=8"], ["the engines 0"]),
        (["cluster.placement=separate", "rollout.engines=8"], ["0 of 1 nodes x 8 GPUs"]),
    ],
)
def test_gpus_that_do_not_suffice_are_refused(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        layout_of(Device.cuda, "cluster=gpu8", *overrides)
    for part in expected:
        assert part in str(caught.value)


def batch_with(**changed):
    sizes = {
        "prompts": 32,
        "samples": 8,
        "minibatches": 2,
        "data_parallel": 2,
        "max_prompt_tokens": 64,
        "max_response_tokens": 64,
        "max_tokens_per_microbatch": 1000,
    }
    return Batch(**(sizes | changed))


def test_batch_by_hand():
    batch = batch_with()
    assert batch.sequences == 256
    assert batch.sequences_per_minibatch == 128
    assert batch.sequences_per_rank == 64
    assert batch.max_sequence_tokens == 128
    assert batch.longest_sequences_per_microbatch == 7
    assert batch.microbatches_of_longest == 10  # 64 / 7, rounded up
    assert batch.max_tokens_per_step == 32768
    assert batch.divides()
    assert not batch_with(minibatches=3).divides()
    assert not batch_with(data_parallel=3).divides()


def test_a_sequence_over_the_budget_has_a_microbatch_of_its_own():
    batch = batch_with(max_tokens_per_microbatch=100)
    assert batch.longest_sequences_per_microbatch == 1
    assert batch.microbatches_of_longest == batch.sequences_per_rank


@given(
    lengths=st.lists(st.integers(1, 128), min_size=64, max_size=64), budget=st.integers(100, 1000)
)
def test_the_number_of_microbatches_is_an_upper_bound(lengths, budget):
    """First-fit packing of any lengths needs no more than the all-longest case."""
    bins = []
    for length in lengths:
        place = next((i for i, used in enumerate(bins) if used + length <= budget), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    assert len(bins) <= batch_with(max_tokens_per_microbatch=budget).microbatches_of_longest


def test_description_shows_the_sums():
    config = settings_with(
        "experiment=quickstart", "actor.data_parallel=2", "rollout.engines=2", "runner.steps=60"
    )
    layout = resolve_layout(config, Device.cpu)
    text = describe(config, layout)
    batch = batch_of(config, layout)
    assert "32 prompts x 8 samples = 256 sequences a step" in text
    assert "/ 2 minibatches = 128 sequences an optimizer step" in text
    assert "/ 2 data-parallel ranks = 64 sequences a rank" in text
    assert f"{batch.max_tokens_per_step:,} a step" in text
    assert "4 ranks on CPU: tensor 2 x pipeline 1 x data 2" in text
    assert "2 x tensor 1, 128 sequences each" in text
    assert "60 steps = 120 optimizer steps, 15,360 sequences" in text
