"""Plans: known layouts fit, what is proposed passes the checks of a run, the impossible is said."""

import dataclasses
import json

import pytest

from rlmath.cli import main
from rlmath.commands.plan import layouts
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.command import BASE
from rlmath.commands.plan.gpus import GPUS, Efficiency
from rlmath.commands.plan.layouts import find_plans, with_least_offload
from rlmath.commands.plan.memory import usable_bytes
from rlmath.commands.plan.models import parameters_of_rank
from rlmath.commands.plan.request import PlanRequest, check_settings, overrides
from rlmath.commands.plan.time import Work, actor_time_s, decoding, forward_flops
from rlmath.config.actor import Logits, Offload, Recompute, RoutingReplay
from rlmath.config.command_line import Given
from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.errors import UserError
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from tests.support.case_files import on_cases

# Too slow to run after each change.
pytestmark = pytest.mark.process

# Samples of a problem, and tensor-parallel ranks of actor and engine in the published recipes.
RECIPES = {
    "DeepSeek-R1-Distill-Qwen-1.5B": (16, 2, 1),
    "DeepSeek-R1-Distill-Qwen-7B": (32, 4, 2),
}


KEYS = {
    "tp": "actor.tensor_parallel",
    "pp": "actor.pipeline_parallel",
    "cp": "actor.context_parallel",
    "engine_tp": "rollout.tensor_parallel",
    "max_tokens": "actor.max_tokens_per_microbatch",
    "recompute_layers": "actor.recompute_num_layers",
    **{
        name: f"actor.{name}"
        for name in (
            *("logits", "offload", "offload_in_backward", "overlap_gradients", "recompute"),
            *("overlap_param_gather", "recompute_modules", "routing_replay", "virtual_stages"),
        )
    },
}


def request_for(name, gpus, **more):
    """A request with the sizes of the published recipes, where ``more`` gives no others."""
    group_size = RECIPES[name][0] if name in RECIPES else 16
    given = Given(load(["model.path=PATH", "runner.run_dir=none", *BASE]), frozenset())
    spec, gpu = more.pop("spec", model_spec(KNOWN[name])), more.pop("gpu", GPUS["h100"])
    request = PlanRequest(f"models/{name}", spec, gpu, given, 1)
    request = request.with_settings({"rollout.max_running_sequences": 256})
    sizes = {
        "gpus": gpus,
        "work": Work(512, group_size, 4, 1024, 27648, 13824),
        "max_tokens": 32768,
    }
    return change(request, **(sizes | more))


def change(request, **more):
    """With other settings, by their short names; ``gpus`` and ``work`` stand for several."""
    if gpus := more.pop("gpus", None):
        values = {"cluster.nodes": -(-gpus // 8), "cluster.gpus_per_node": min(gpus, 8)}
        request = request.with_settings(values)
    if work := more.pop("work", None):
        request = dataclasses.replace(request, mean_response_tokens=work.mean_response_tokens)
        values = {
            "algorithm.prompts_per_step": work.prompts,
            "algorithm.group_size": work.group_size,
            "algorithm.minibatches_per_step": work.minibatches,
            "data.max_prompt_tokens": work.prompt_tokens,
            "rollout.max_response_tokens": work.response_tokens,
        }
        request = request.with_settings(values)
    return request.with_settings({KEYS[name]: value for name, value in more.items()})


@pytest.mark.parametrize("gpus", [8, 128])
@pytest.mark.parametrize("name", RECIPES)
def test_the_published_layouts_fit(name, gpus):
    """Their tensor parallelism and 20 recomputed layers, on 80 GB, with engines' share of 0.6."""
    _, tp, engine_tp = RECIPES[name]
    asked = request_for(name, gpus, tp=tp, pp=1, cp=1, engine_tp=engine_tp, recompute_layers=20)
    (plan,) = find_plans(asked)
    assert (plan.actor.layout, plan.engine_tp) == (Layout(tp, 1, gpus // tp), engine_tp)
    assert plan.engine_share >= 0.6
    assert plan.cache_tokens >= 27648 + 1024
    for phase in plan.phases:
        assert phase.num_bytes <= usable_bytes(80), phase.describe()


@pytest.mark.parametrize("gpus", [8, 128])
@pytest.mark.parametrize("name", RECIPES)
def test_every_plan_passes_the_checks_of_a_run(name, gpus):
    asked = request_for(name, gpus)
    plans = find_plans(asked)
    assert {plan.actor.layout.tensor_parallel for plan in plans} >= {RECIPES[name][1]}
    fastest = min(plan.step_s for plan in plans)
    assert plans[0].step_s <= 1.03 * fastest
    slower = [plan.step_s for plan in plans if plan.step_s > 1.03 * fastest]
    assert [plan.step_s for plan in plans][-len(slower) :] == sorted(slower)
    for plan in plans[:3]:
        config, layout = check_settings(asked, overrides(asked, plan))
        assert layout.actor.data_parallel == plan.actor.layout.data_parallel
        assert layout.engines == plan.engines
        assert config.actor.recompute_num_layers == (plan.actor.recompute_layers or None)


def test_a_layout_that_is_too_large_says_which_phase_and_by_what():
    """7 B on one rank: 32,768 tokens x 152,064 logits and their gradient are 18.6 GiB alone. In
    chunks they fit."""
    asked = request_for("DeepSeek-R1-Distill-Qwen-7B", 8, tp=1, pp=1, cp=1)
    (plan,) = find_plans(asked)
    assert "actor.logits=whole" not in overrides(asked, plan)
    whole = change(asked, logits=Logits.whole)
    assert "actor.logits=whole" in overrides(whole, plan)
    with pytest.raises(UserError) as refused:
        find_plans(whole)
    text = str(refused.value)
    assert "actor TP 1 x PP 1 x DP 8, 28 of 28 layers recomputed: logits" in text
    assert " state + " in text
    assert "of which 76.0 are planned with" in text


def test_context_ranks_make_long_sequences_fit():
    """7 B, one tensor rank, 49,152 tokens: too large for one GPU, not for four that share them."""
    alone = {"tp": 1, "pp": 1, "max_tokens": 49152}
    with pytest.raises(UserError):
        find_plans(request_for("DeepSeek-R1-Distill-Qwen-7B", 8, cp=1, **alone))
    asked = request_for("DeepSeek-R1-Distill-Qwen-7B", 8, cp=4, **alone)
    (plan,) = find_plans(asked)
    settings = overrides(asked, plan)
    config, layout = check_settings(asked, settings)
    assert config.actor.context_parallel == layout.actor.context_parallel == 4
    assert layout.actor.data_parallel == 2


def test_plans_of_a_mixture_pass_the_checks():
    """On 16 GPUs of 80 GB, as the preset has it: two tensor ranks, eight expert ranks."""
    asked = request_for(
        "Qwen3-30B-A3B", 16, work=Work(512, 16, 4, 1024, 8192, 4096), max_tokens=9216
    )
    plans = find_plans(asked)
    assert Layout(2, 1, 8, expert_parallel=8) in {plan.actor.layout for plan in plans}
    for ep in (1, 4, 8):
        plan = next(plan for plan in plans if plan.actor.layout.expert_parallel == ep)
        settings = overrides(asked, plan)
        config, layout = check_settings(asked, settings)
        assert config.actor.expert_parallel == ep
        assert layout.actor.world_size == 16


LAYOUT_OF_16 = ("cluster.nodes=2", "rollout.max_response_tokens=4096")


@pytest.mark.parametrize("name", [name for name in options("model") if name != "tiny"])
def test_presets_are_known(name, capsys):
    assert main(["plan", "layout", f"model.path={name}", *LAYOUT_OF_16]) == 0
    assert "model.path=models/" in capsys.readouterr().out


def test_the_largest_microbatch_is_the_largest():
    """It fits when it is asked for, and 1,024 tokens more do not."""
    asked = request_for("DeepSeek-R1-Distill-Qwen-7B", 8, tp=4, pp=1, cp=1)
    (plan,) = find_plans(asked)
    most = layouts.most_tokens(asked, plan)
    assert most > 32768
    layers = {"recompute_layers": 28}
    fits = request_for(asked.path[7:], 8, tp=4, pp=1, cp=1, max_tokens=most, **layers)
    assert find_plans(fits)[0].actor.max_tokens == most
    more = request_for(asked.path[7:], 8, tp=4, pp=1, cp=1, max_tokens=most + 1024, **layers)
    with pytest.raises(UserError, match="training"):
        find_plans(more)


def test_a_batch_that_does_not_divide_is_refused():
    asked = request_for("Qwen2.5-0.5B", 8, tp=1, pp=1, cp=1, work=Work(3, 4, 1, 100, 100, 50))
    with pytest.raises(UserError, match=r"12 sequences / 1 minibatches / 8 copies = 1\.5"):
        find_plans(asked)


def test_an_update_is_three_forward_passes_and_one_more_when_recomputed():
    spec, gpu, exact = model_spec(KNOWN["Qwen2.5-7B"]), GPUS["h100"], Efficiency(mfu=0.5)
    work = Work(64, 8, 2, 1000, 2000, 1000)
    forward = work.tokens * forward_flops(spec, 2000) / (0.5 * 989e12)
    for layers, passes in ((0, 3), (28, 4), (14, 3.5)):
        actor = ActorShape(Layout(), layers, 32768)
        log_probs, update = actor_time_s(spec, actor, work, gpu, exact, gpus_per_node=8)
        assert log_probs == pytest.approx(forward)
        assert update == pytest.approx(passes * forward)


def test_stages_need_not_divide_the_layers():
    config = KNOWN["Qwen2.5-1.5B"] | {"num_hidden_layers": 27}
    odd = request_for("Qwen2.5-1.5B", 8, spec=model_spec(config), pp=4)
    (best, *_) = find_plans(odd)
    assert best.actor.layout.stage_sizes(27) == (7, 7, 7, 6)
    config, layout = check_settings(odd, overrides(odd, best))
    assert layout.actor.pipeline_parallel == 4


def test_decoding_reads_weights_and_cache():
    """One sequence, no latency: bytes over bandwidth, for every token."""
    spec, gpu = model_spec(KNOWN["Qwen2.5-7B"]), GPUS["h100"]
    exact = Efficiency(decode_bandwidth=1.0, decode_step_s=0.0)
    work = Work(1, 1, 1, 100, 200, 200)
    done = decoding(spec, 1, 1, 1e6, 256, work, gpu, exact)
    per_token = (2 * 7_615_616_512 + 200 * 57_344) / 3350e9
    assert done.running == 1
    assert done.tail_s == 0
    assert done.seconds == pytest.approx(200 * per_token)


def test_the_cache_bounds_what_runs_at_once():
    spec, gpu = model_spec(KNOWN["Qwen2.5-7B"]), GPUS["h100"]
    work = Work(64, 8, 1, 1000, 4000, 4000)
    assert decoding(spec, 1, 1, 50_000, 256, work, gpu, Efficiency()).running == 10
    assert decoding(spec, 1, 1, 5e6, 256, work, gpu, Efficiency()).running == 256
    assert decoding(spec, 8, 1, 5e6, 256, work, gpu, Efficiency()).running == 64


def test_the_command_prints_settings_that_compose(capsys):
    asked = ["plan", "layout", "model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "512 prompts x 16 samples = 8,192 sequences a step" in text
    assert "assumed (docs/gpu_results.md" in text
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 7_615_616_512
    best = found["plans"][0]
    assert best["step_s"] == pytest.approx(sum(best["seconds"].values()))
    for line in best["overrides"]:
        assert f"  {line}\n" in text
    assert max(sum(terms.values()) for terms in best["phases_gib"].values()) <= found["usable_gib"]


def test_sizes_by_flags_are_the_model(capsys, tmp_path):
    flags = "--layers 28 --hidden 3584 --ffn 18944 --heads 28 --kv-heads 4 --vocab 152064"
    assert main(["plan", "layout", *flags.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 7_615_616_512
    config = tmp_path / "config.json"
    config.write_text(json.dumps(KNOWN["Qwen3-8B"]))
    assert main(["plan", "layout", f"model.path={config}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8_190_735_360


def test_calls_of_tools_are_waited_for_at_the_end_or_all_the_time(capsys):
    words = ["plan", "layout", "model.path=Qwen2.5-1.5B", "cluster.gpus_per_node=1"]

    def generate_s(*more):
        assert main([*words, *more, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["plans"][0]["seconds"]["generate"])

    alone, tools = generate_s(), ["rollout.tools=[python]", "--calls", "3", "--call-s"]
    assert generate_s(*tools, "0.5") == pytest.approx(alone + 1.5)
    own = ["rollout.environment=collections:OrderedDict", *tools[1:]]
    assert generate_s(*own, "0.5") == pytest.approx(alone + 1.5)
    sequences = 512 * 16
    slow = [*tools, "1e4", "rollout.parallel_calls=16"]
    assert generate_s(*slow) == pytest.approx(sequences * 3e4 / 16)
    assert main([*words, *tools, "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "3 calls of 0.5 s" in shown and "rollout.tools=[python]" in shown


@on_cases("arguments, message", __file__, "plan_refused")
def test_plan_refuses_invalid_arguments(arguments, message, capsys):
    assert main(["plan", "layout", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("tokens", "sequences", "minibatches", "length", "recomputed", "measured_s"),
    [
        # rlmath selfcheck gpu: four micro-batches.
        (4096, 4, 1, 4096, 0, 0.782),
        (16384, 4, 1, 16384, 5, 2.345),
        # A step of a run, two sequences in a micro-batch; not what the assumptions were made from.
        (4116, 128, 4, 2058, 0, 12.90),
    ],
)
def test_updates_take_as_long_as_they_took_on_an_h100(
    tokens, sequences, minibatches, length, recomputed, measured_s
):
    """DeepSeek-R1-Distill-Qwen-1.5B; docs/gpu_results.md."""
    spec = model_spec(KNOWN["DeepSeek-R1-Distill-Qwen-1.5B"])
    actor = ActorShape(Layout(), recomputed, tokens)
    work = Work(sequences, 1, minibatches, 4, length - 4, length - 4)
    _, update_s = actor_time_s(spec, actor, work, GPUS["h100"], Efficiency(), gpus_per_node=1)
    assert update_s == pytest.approx(measured_s, rel=0.05)


@pytest.mark.parametrize(
    ("name", "gpus", "prompt", "response"),
    [
        ("DeepSeek-R1-Distill-Qwen-1.5B", 8, 512, 3584),
        ("Qwen2.5-1.5B", 2, 1024, 7168),
        ("Qwen2.5-3B", 8, 512, 1536),
        ("Qwen3-30B-A3B", 32, 1024, 3072),
        ("Qwen3-30B-A3B", 128, 1024, 7168),
    ],
)
def test_micro_batches_of_an_moe_and_of_a_small_model_have_at_least_16k_tokens(
    name, gpus, prompt, response
):
    """Their layers take the host as long to launch as a GPU to compute."""
    work = Work(512, 16, 4, prompt, response, response / 2)
    plan = find_plans(request_for(name, gpus, work=work, max_tokens=None))[0]
    longest = prompt + response
    sequences = work.sequences // work.minibatches // plan.actor.layout.data_parallel
    assert plan.actor.max_tokens >= min(16384, sequences * longest)
    assert plan.actor.max_tokens < 16384 + longest
    # A larger model's is one sequence where that is as fast.
    large = find_plans(request_for("Qwen2.5-32B", 128, work=work, max_tokens=None))[0]
    assert large.actor.max_tokens < plan.actor.max_tokens


COLOCATED = Work(128, 8, 1, 1024, 8192, 4096)


@pytest.mark.parametrize(("name", "gpus"), [("Qwen2.5-7B", 8), ("Qwen2.5-32B", 32)])
def test_7b_fits_a_node_and_32b_four_with_everything_on_the_gpus(name, gpus):
    chosen, (best, *_) = with_least_offload(
        request_for(name, gpus, work=COLOCATED, max_tokens=None)
    )
    assert chosen.config.actor.offload.value == "none"
    assert best.seconds["offload"] == 0.0


def test_state_leaves_the_gpus_where_nothing_fits_otherwise():
    """32 B on one node: 68.7 GiB of state a GPU of 80, so that no engine wakes beside it."""
    asked = request_for("Qwen2.5-32B", 8, work=COLOCATED, max_tokens=None, tp=4)
    with pytest.raises(UserError, match=r"68\.7 state"):
        with_least_offload(change(asked, offload=Offload.none))
    chosen, (best, *_) = with_least_offload(asked)
    assert chosen.config.actor.offload.value == "optimizer"
    settings = overrides(chosen, best)
    config, _ = check_settings(chosen, settings)
    assert config.actor.offload.value == "optimizer"
    for phase in best.phases:
        assert phase.num_bytes <= usable_bytes(80), phase.describe()
    # Main parameters and moments of a rank, there and back at 25 GB/s.
    rank = 4 * parameters_of_rank(asked.spec, best.actor.layout, 0) * 3
    assert best.seconds["offload"] == pytest.approx(2 * rank / 25e9, rel=0.05)
    everything, (all_out, *_) = with_least_offload(change(asked, offload=Offload.all))
    assert everything.config.actor.offload.value == "all"
    wake_up = {p.name: p for p in all_out.phases}["wake-up"]
    assert wake_up.terms["actor"] < 3 * 2**30, "its process and small buffers"
    assert all_out.seconds["offload"] > best.seconds["offload"]
    assert all_out.host_bytes > best.host_bytes > 8 * rank


def test_the_optimizer_comes_for_its_steps_alone():
    """32 B on one node at TP 8: activations have the memory of 12 bytes a weight, and each of four
    minibatches waits for two copies of them."""
    work = dataclasses.replace(COLOCATED, minibatches=4)
    asked = request_for("Qwen2.5-32B", 8, work=work, max_tokens=9216, tp=8, offload=Offload.all)
    late = change(asked, offload_in_backward=True)
    plain, more = find_plans(asked)[0], find_plans(late)[0]
    rank = parameters_of_rank(asked.spec, more.actor.layout, 0)
    phases = {one.name: one for one in more.phases}
    assert phases["training"].terms["state"] == 6 * rank
    assert phases["optimizer step"].terms["state"] == 18 * rank
    assert {one.name: one for one in plain.phases}["training"].terms["state"] == 18 * rank
    # The first copy and the last are those that exist without it.
    assert more.seconds["offload"] == pytest.approx(2 * (4 * 12 + 2) * rank / 25e9)
    assert plain.seconds["offload"] == pytest.approx(2 * 14 * rank / 25e9)
    assert more.actor.recompute_layers < plain.actor.recompute_layers
    assert more.host_bytes == plain.host_bytes
    config, _ = check_settings(late, overrides(late, more))
    assert config.actor.offload_in_backward


def test_sums_of_gradients_hide_behind_the_last_backward_pass():
    """Two thirds of what copies send, float32 gradients against bfloat16 weights, and no more than
    a backward pass takes."""
    asked = request_for(
        "Qwen2.5-1.5B", 16, work=COLOCATED, tp=1, max_tokens=9216, recompute_layers=28
    )
    asked = change(asked, pp=1, cp=1)
    late = find_plans(asked)[0]
    overlapped = change(asked, overlap_gradients=True)
    early = find_plans(overlapped)[0]
    weights = parameters_of_rank(asked.spec, late.actor.layout, 0)
    # Sixteen GPUs are two nodes.
    rate = asked.efficiency.network_gb_per_s * 1e9 * asked.efficiency.link
    hidden = 4 * weights * 15 / 16 / rate
    saved = late.seconds["update"] - early.seconds["update"]
    assert 0 < saved <= hidden * (1 + 1e-9)
    assert early.seconds["log_probs"] == late.seconds["log_probs"]
    settings = overrides(overlapped, early)
    config, _ = check_settings(asked, settings)
    assert config.actor.overlap_gradients
    (alone,) = find_plans(change(asked, gpus=1, offload=Offload.all, overlap_gradients=True))
    assert not alone.actor.overlap_gradients, "there is nothing to add up"


def test_gathers_of_weights_hide_behind_the_first_forward_pass():
    """A third of what copies send, of all minibatches but the last, and no more than the forward
    pass of their first micro-batches takes."""
    four = dataclasses.replace(COLOCATED, minibatches=4)
    asked = request_for("Qwen2.5-1.5B", 16, work=four, tp=1, max_tokens=9216, recompute_layers=28)
    asked = change(asked, pp=1, cp=1, overlap_gradients=True)
    late = find_plans(asked)[0]
    overlapped = change(asked, overlap_param_gather=True)
    early = find_plans(overlapped)[0]
    assert late.actor.layout == early.actor.layout
    weights = parameters_of_rank(asked.spec, late.actor.layout, 0)
    rate = asked.efficiency.network_gb_per_s * 1e9 * asked.efficiency.link
    gathered = 4 * 2 * weights * 15 / 16 / rate
    saved = late.seconds["update"] - early.seconds["update"]
    microbatches = four.sequences / 4 / 16 * four.mean_tokens / late.actor.max_tokens
    first_passes = late.seconds["log_probs"] / microbatches
    assert saved == pytest.approx(3 / 4 * min(gathered, first_passes), rel=0.05)
    assert early.seconds["log_probs"] == late.seconds["log_probs"]
    config, _ = check_settings(asked, overrides(overlapped, early))
    assert config.actor.overlap_param_gather
    once = change(asked, work=COLOCATED)
    plain, *_ = find_plans(once)
    none, *_ = find_plans(change(once, overlap_param_gather=True))
    assert plain.seconds["update"] == none.seconds["update"], "the weight sync follows"
    assert not none.actor.overlap_param_gather


def test_virtual_stages_and_replayed_routes_are_planned():
    """The stages that the chunks divide; the routes that a node's ranks keep."""
    asked = request_for("Qwen2.5-32B", 32, work=COLOCATED, max_tokens=None, virtual_stages=2)
    best, *_ = find_plans(asked)
    layout = best.actor.layout
    assert layout.pipeline_parallel > 1 and layout.virtual_stages == 2
    config, _ = check_settings(asked, overrides(asked, best))
    assert config.actor.virtual_stages == 2
    with pytest.raises(UserError, match=r"actor\.virtual_stages=5"):
        find_plans(change(asked, virtual_stages=5))
    two = dataclasses.replace(COLOCATED, minibatches=2)
    replay = RoutingReplay.old_log_probs
    asked = request_for("Qwen3-30B-A3B", 32, work=two, max_tokens=None, routing_replay=replay)
    best, *_ = find_plans(asked)
    config, _ = check_settings(asked, overrides(asked, best))
    assert config.actor.routing_replay.value == "old_log_probs"
    without, *_ = find_plans(change(asked, routing_replay=RoutingReplay.none))
    assert best.host_bytes > without.host_bytes
    of_engine = change(asked, routing_replay=RoutingReplay.engine)
    sampled, *_ = find_plans(of_engine)
    assert "actor.routing_replay=engine" in overrides(of_engine, sampled)
    # The driver's samples, shards and kept batch, and what each of the node's ranks lays out of its
    # tokens: of all 48 layers, 8 experts.
    layout = sampled.actor.layout
    assert layout == best.actor.layout and layout.world_size == 32
    of_share = -(-two.sequences // layout.data_parallel) * two.longest_tokens * 48 * 8
    more = sampled.host_bytes - best.host_bytes
    copies = 3 * layout.data_parallel + 8 / layout.tensor_parallel
    assert more == pytest.approx(copies * of_share)


def test_recomputed_modules_take_their_flops_again():
    """The feed-forward of every layer: 2 operations for each of its weights and token, of the
    update's 6; nothing else becomes slower, and more tokens fit than without."""
    asked = request_for(
        "Qwen2.5-1.5B", 8, work=COLOCATED, tp=1, max_tokens=9216, recompute=Recompute.none
    )
    asked = change(asked, pp=1, cp=1, offload=Offload.all)
    plain, *_ = find_plans(asked)
    selective = change(asked, recompute=Recompute.selective, recompute_modules=["mlp"])
    again, *_ = find_plans(selective)
    config, _ = check_settings(selective, overrides(selective, again))
    assert config.actor.recompute.value == "selective"
    assert config.actor.recompute_modules == ["mlp"]
    weights = 28 * 3 * 1536 * 8960
    flops = 2 * weights * asked.work.tokens / (8 * asked.gpu.peak_tflops * 1e12)
    slower = again.seconds["update"] - plain.seconds["update"]
    assert slower == pytest.approx(flops / asked.efficiency.mfu, rel=0.01)
    assert again.seconds["log_probs"] == plain.seconds["log_probs"]
    kept = {
        one.name: one.terms["activations"] for one in again.phases if "activations" in one.terms
    }
    whole = {
        one.name: one.terms["activations"] for one in plain.phases if "activations" in one.terms
    }
    saved = 28 * asked.work.longest_tokens * 2 * (3 * 8960 + 1536)
    assert whole["training"] - kept["training"] == pytest.approx(saved)


def test_the_command_proposes_it(capsys):
    size = ("model.path=Qwen2.5-7B", "cluster.gpus_per_node=2", "algorithm.prompts_per_step=8")
    more = ("rollout.max_response_tokens=2048", "actor.tensor_parallel=2")
    assert main(["plan", "layout", *size, *more]) == 0
    said = capsys.readouterr().out
    assert "actor.offload=optimizer\n" in said
    assert "what actor.offload=optimizer moves takes 25 GB/s each way" in said
    assert main(["plan", "layout", *size, *more, "actor.offload=none"]) == 2
    assert "no layout of this model fits 2 GPUs" in capsys.readouterr().err


def test_long_responses_are_proposed_fp8_keys_and_values_and_carry_over(capsys):
    words = ["model.path=DeepSeek-R1-Distill-Qwen-7B", "cluster=gpu16x8"]
    words += ["algorithm.prompts_per_step=512", "algorithm.group_size=16"]
    faster = "rollout.kv_cache_dtype=fp8 rollout.schedule=carry_over rollout.max_lag=2"

    def plan_output(*more):
        assert main(["plan", "layout", *words, *more]) == 0
        return capsys.readouterr().out

    text = plan_output("rollout.max_response_tokens=27648")
    head, *lines = text.partition("faster than ")[2].splitlines()[:4]
    seconds = [float(head.split()[0].replace(",", ""))]
    seconds += [float(line.split(": ")[1].split()[0].replace(",", "")) for line in lines if line]
    assert len(seconds) == 4 and seconds == sorted(seconds, reverse=True)
    assert lines[-1].strip().startswith(f"{faster} algorithm.correction.kind=token_truncate")
    # As it would be given.
    given = plan_output("rollout.max_response_tokens=27648", "rollout.kv_cache_dtype=fp8")
    assert "kv_cache_dtype" not in given.partition("faster than ")[2].partition("assumed")[0]
    assert "faster than" not in plan_output("rollout.max_response_tokens=2048")
