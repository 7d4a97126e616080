"""The GPU presets of ``conf/``, and layouts of them to count, from 8 to 1,024 GPUs.

GPU presets are the experiments whose cluster is CUDA and every model of ``conf/model`` but the
``tiny`` one, with the actor and rollout settings for long contexts, on ``cluster=gpu8`` and
``cluster=gpu16x8``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from benchmarks.dry_run.jobs import PHASES, Job, jobs_of
from rlmath.config.groups import options

_LONG = ("actor=long_context", "rollout=long_context")
EXPERIMENTS = ("qwen2.5-1.5b-grpo-megatron", "qwen2.5-7b-grpo-megatron")
# Models that one node does not hold, and the nodes that they take at least.
LEAST_NODES = {"qwen3_30b_a3b": 2}
# Defaults of layouts that no preset has.
_RECOMPUTED = ("actor.recompute=full", "actor.recompute_num_layers=20")
_SELECTIVE = ("actor.recompute=selective", "actor.recompute_num_layers=null")
MOE = ("qwen3_30b_a3b",)
MOE_LAYERS = 2


@dataclass(frozen=True)
class Case:
    """Settings whose ranks are counted.

    Attributes:
        name: For messages and tables.
        overrides: As for ``rlmath train``.
        layers: Layers of the model; ``None``: all. Megatron's own experts run one by one,
            which takes minutes for a whole MoE on meta tensors; all terms are linear in layers.
        phases: Phases to count.
    """

    name: str
    overrides: tuple[str, ...]
    layers: int | None = None
    phases: tuple[str, ...] = PHASES

    def jobs(self) -> list[Job]:
        """A rank of each stage."""
        return _jobs_of(self)


@functools.cache
def _jobs_of(case: Case) -> list[Job]:
    return jobs_of(case.name, case.overrides, case.layers, phases=case.phases)


def gpu_models() -> list[str]:
    """Models of ``conf/model`` that are made for GPUs."""
    return [name for name in options("model") if name != "tiny"]


def preset_cases() -> list[Case]:
    """Every GPU preset, and the experiments on 8 and on 1,024 GPUs.

    Where only the number of copies differs from a case before it, what depends on that is counted:
    the state and the checkpoint.
    """
    of_copies = ("state", "checkpoint")
    cases = []
    for name in EXPERIMENTS:
        cases.append(Case(f"{name} (128 GPUs)", (f"experiment={name}",)))
        for nodes in (1, 128):
            # Optimizer states on 8 GPUs leave engines less than on 128.
            share = ("rollout.gpu_memory_utilization=0.6",) if nodes == 1 else ()
            more = (f"experiment={name}", f"cluster.nodes={nodes}", *share)
            cases.append(Case(f"{name} ({8 * nodes:,} GPUs)", more, phases=of_copies))
    for model in gpu_models():
        layers = MOE_LAYERS if model in MOE else None
        for nodes in (LEAST_NODES.get(model, 1), 16):
            cluster = ("cluster=gpu16x8", f"cluster.nodes={nodes}")
            cases.append(
                Case(
                    f"{model} ({8 * nodes} GPUs)",
                    (f"model={model}", *_LONG, *cluster),
                    layers,
                    of_copies if nodes == 16 else PHASES,
                )
            )
    return cases


def layout_cases() -> list[Case]:
    """Layouts that no preset has: pipeline, context and expert ranks, and uncommon batches.

    Of models with a few of their layers: the presets have them all.
    """

    def case(name: str, model: str, nodes: int, *more: str) -> Case:
        cluster = ("cluster=gpu16x8", f"cluster.nodes={nodes}")
        layers = 4 if model in MOE else 8
        return Case(name, (f"model={model}", *_LONG, *cluster, *_RECOMPUTED, *more), layers)

    def latent(name: str, layers: int, *more: str) -> Case:
        cluster = ("cluster=gpu16x8", "cluster.nodes=16", "actor.expert_parallel=64")
        settings = ("model.path=DeepSeek-V3", *_LONG, *cluster, "actor.recompute=none", *more)
        return Case(name, settings, layers)

    small = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=7168")
    budget = "actor.max_tokens_per_microbatch=8192"
    return [
        case(
            "7B PP 2",
            "r1_distill_qwen_7b",
            16,
            "actor.pipeline_parallel=2",
            "actor.recompute_num_layers=7",
            *small,
            budget,
        ),
        case(
            "7B PP 4",
            "r1_distill_qwen_7b",
            128,
            "actor.pipeline_parallel=4",
            "actor.recompute=none",
            *small,
            budget,
        ),
        case(
            "7B PP 2 x VP 2",
            "r1_distill_qwen_7b",
            16,
            "actor.pipeline_parallel=2",
            "actor.virtual_stages=2",
            "actor.recompute=none",
            *small,
            budget,
        ),
        # Three dense layers on one stage, and three MoE ones on the other.
        latent(
            "DeepSeek-V3 TP 4 x PP 2",
            6,
            "actor.tensor_parallel=4",
            "actor.pipeline_parallel=2",
            "data.max_prompt_tokens=1024",
            "rollout.max_response_tokens=31744",
            "actor.max_tokens_per_microbatch=32768",
        ),
        latent(
            "DeepSeek-V3 TP 2 x CP 2",
            4,
            "actor.tensor_parallel=2",
            "actor.context_parallel=2",
            *small,
            budget,
        ),
        latent("DeepSeek-V3 TP 1", 4, "actor.tensor_parallel=1", *small, budget),
        case("1.5B tied PP 2", "qwen2.5_1.5b", 1, "actor.pipeline_parallel=2", *small, budget),
        case("7B CP 2", "r1_distill_qwen_7b", 16, "actor.context_parallel=2"),
        case(
            "1.5B CP 4, odd lengths",
            "r1_distill_qwen_1.5b",
            16,
            "actor.context_parallel=4",
            "data.max_prompt_tokens=1021",
            "rollout.max_response_tokens=9973",
            "actor.max_tokens_per_microbatch=32771",
        ),
        case("30B EP 8 PP 2", "qwen3_30b_a3b", 16, "actor.pipeline_parallel=2", *small, budget),
        case(
            "30B EP 8 without recomputation",
            "qwen3_30b_a3b",
            2,
            "actor.recompute=none",
            *small,
            budget,
        ),
        case("30B EP 4", "qwen3_30b_a3b", 8, "actor.expert_parallel=4", *small, budget),
        case(
            "1.5B without recomputation",
            "r1_distill_qwen_1.5b",
            1,
            "actor.recompute=none",
            *small,
            budget,
        ),
        case(
            "1.5B, a sequence above the budget",
            "r1_distill_qwen_1.5b",
            1,
            "actor.max_tokens_per_microbatch=8192",
        ),
        case("1.5B TP 1", "r1_distill_qwen_1.5b", 1, "actor.tensor_parallel=1", *small, budget),
        case(
            "1.5B TP 1 without recomputation",
            "r1_distill_qwen_1.5b",
            1,
            "actor.tensor_parallel=1",
            "actor.recompute=none",
            *small,
            budget,
        ),
        case(
            "1.5B TP 1, feed-forward recomputed",
            "r1_distill_qwen_1.5b",
            1,
            "actor.tensor_parallel=1",
            *_SELECTIVE,
            *small,
            budget,
        ),
        case(
            "7B CP 2, attention and feed-forward recomputed",
            "r1_distill_qwen_7b",
            16,
            "actor.context_parallel=2",
            *_SELECTIVE,
            "actor.recompute_modules=[core_attn,mlp]",
            *small,
            budget,
        ),
        case("30B EP 8, experts recomputed", "qwen3_30b_a3b", 2, *_SELECTIVE, *small, budget),
        case(
            "1.5B TP 1, gradients summed and weights gathered within passes",
            "r1_distill_qwen_1.5b",
            1,
            "actor.tensor_parallel=1",
            "actor.overlap_gradients=true",
            "actor.overlap_param_gather=true",
            *small,
            budget,
        ),
        case(
            "1.5B, whole logits",
            "r1_distill_qwen_1.5b",
            1,
            "actor.logits=whole",
            *small,
            budget,
        ),
        case(
            "1.5B, output layer in float32",
            "r1_distill_qwen_1.5b",
            1,
            "precision.lm_head_dtype=float32",
            *small,
            budget,
        ),
        case("7B with a KL term", "r1_distill_qwen_7b", 16, "algorithm.kl_coef=0.001", *small),
        case(
            "1.5B with a value model",
            "r1_distill_qwen_1.5b",
            1,
            "algorithm.advantage=gae",
            *small,
            budget,
        ),
        case(
            "1.5B, LoRA and a KL term",
            "r1_distill_qwen_1.5b",
            1,
            "actor.lora.rank=32",
            "algorithm.kl_coef=0.001",
            *small,
            budget,
        ),
        case(
            "1.5B, LoRA on queries and values",
            "r1_distill_qwen_1.5b",
            1,
            "actor.lora.rank=32",
            "actor.lora.targets=[q_proj,v_proj]",
            "actor.recompute=none",
            *small,
            budget,
        ),
        case(
            "30B EP 8, LoRA",
            "qwen3_30b_a3b",
            2,
            "actor.lora.rank=32",
            "actor.recompute=none",
            *small,
            budget,
        ),
        case(
            "30B EP 8, LoRA on experts",
            "qwen3_30b_a3b",
            2,
            "actor.lora.rank=32",
            "actor.lora.targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
            "actor.recompute=none",
            *small,
            budget,
        ),
        case(
            "1.5B with a value model and a KL term, all offloaded",
            "r1_distill_qwen_1.5b",
            1,
            "algorithm.advantage=gae",
            "algorithm.kl_coef=0.001",
            "actor.offload=all",
            *small,
            budget,
        ),
        case(
            "1.5B TP 1, optimizer offloaded",
            "r1_distill_qwen_1.5b",
            1,
            "actor.tensor_parallel=1",
            "actor.offload=optimizer",
            *small,
            budget,
        ),
        case(
            "1.5B with a value model, optimizers on the GPU for their steps",
            "r1_distill_qwen_1.5b",
            1,
            "algorithm.advantage=gae",
            "actor.offload=all",
            "actor.offload_in_backward=true",
            "actor.recompute=none",
            "actor.recompute_num_layers=null",
            *small,
            budget,
        ),
    ]
