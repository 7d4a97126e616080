"""Every setting, its type, its default and what it does. Hydra composes ``conf/`` onto these.

A setting is documented on the line above it. ``MISSING`` (``???`` in a file) has to be given.
Ranges and combinations are checked in ``rlmath/config/checks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from rlmath.config.schema_algorithm import (
    CorrectionConfig,
    CurriculumConfig,
    DppoDivergence,
    FilterConfig,
    KlPlace,
    ReferenceConfig,
    TruncatedRule,
)
from rlmath.config.schema_precision import PrecisionConfig
from rlmath.config.schema_reliability import CollapseConfig, WatchdogConfig


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class OldLogProbs(Enum):
    recompute = "recompute"
    engine = "engine"


class MalformedRow(Enum):
    stop = "stop"
    skip = "skip"


class OverlongPrompt(Enum):
    stop = "stop"
    filter = "filter"


class Layers(Enum):
    auto = "auto"
    transformer_engine = "transformer_engine"
    local = "local"


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Placement(Enum):
    colocated = "colocated"
    separate = "separate"


class Transport(Enum):
    auto = "auto"
    shared_memory = "shared_memory"
    object_store = "object_store"
    ipc = "ipc"
    nccl = "nccl"
    nccl_m2n = "nccl_m2n"


class Fallback(Enum):
    none = "none"
    marker = "marker"
    number = "number"


class OnMisalignment(Enum):
    stop = "stop"
    warn = "warn"


class OnRewardError(Enum):
    stop = "stop"
    skip = "skip"


@dataclass
class ModelConfig:
    # Hugging Face folder: config.json, tokenizer, safetensors. The word tiny stands for a random
    # model of 0.66 million parameters that is made in run_dir.
    path: str = MISSING
    # Type of weights and activations in the actor and in the engines.
    dtype: DType = DType.bfloat16
    # Expected architecture (Qwen2ForCausalLM, ...); null takes what the folder's config.json says.
    architecture: str | None = None


@dataclass
class DataConfig:
    # Files with training problems: .jsonl, .json or .parquet, or data sets of the hub, written
    # hub:ORGANISATION/NAME:CONFIGURATION:SPLIT.
    train_paths: list[str] = field(default_factory=list)
    # A weight for each of train_paths: of every step's problems each file gives its share, however
    # many rows it has; empty: all rows count alike.
    train_weights: list[float] = field(default_factory=list)
    # Files with held-out problems; empty: no evaluation.
    eval_paths: list[str] = field(default_factory=list)
    # Field that holds the prompt: text, or a list of chat messages with apply_chat_template.
    prompt_key: str = "prompt"
    # Field that holds the accepted answer, or a list of them.
    answer_key: str = "solutions"
    # Put the prompt through the tokenizer's chat template; text becomes one user message.
    apply_chat_template: bool = False
    # First message of every prompt; needs apply_chat_template.
    system_prompt: str | None = None
    # A prompt template with {prompt} in it, applied to text before tokenization.
    prompt_template: str | None = None
    # Longest prompt, in tokens.
    max_prompt_tokens: int = 1024
    # What to do with a longer one: stop before the run, or leave it out and count it.
    overlong_prompts: OverlongPrompt = OverlongPrompt.filter
    # What to do with a row that cannot be read: stop with file, line and field, or skip and count.
    malformed_rows: MalformedRow = MalformedRow.stop
    # Shuffle the training problems anew each epoch, by seed.
    shuffle: bool = True
    # Seed of the order.
    seed: int = 0
    # At most so many held-out problems, the first ones; null: all.
    max_eval_problems: int | None = None


@dataclass
class AlgorithmConfig:
    # Problems sampled per step.
    prompts_per_step: int = 512
    # Samples per problem.
    group_size: int = 16
    # Optimizer steps per rollout; the step's sequences are cut into so many minibatches.
    minibatches_per_step: int = 4
    # How rewards become advantages; see rlmath/algorithms/advantages/.
    advantage: str = "grpo"
    # The baseline of grpo is the mean of the group's other samples.
    leave_one_out: bool = False
    # The deviation of grpo is that of the group's other samples; where these are all equal, the
    # difference to the baseline is not divided.
    leave_one_out_std: bool = False
    # Added to the deviation that advantages are divided by.
    advantage_epsilon: float = 1e-6
    # After the estimator, whiten advantages over all tokens of the step's loss.
    whiten_tokens: bool = False
    # The k of pass_at_k: samples of which one has to be right.
    pass_at_k: int = 4
    # Policy loss; see rlmath/algorithms/losses/.
    loss: str = "ppo_clip"
    # How token losses become one number; see rlmath/algorithms/aggregation.py.
    aggregation: str = "token_mean"
    # What seq_sum_constant divides by; null: rollout.max_response_tokens.
    aggregation_constant_tokens: int | None = None
    # Allow an aggregation that the loss is not defined for; the result is not the paper's method.
    allow_other_aggregation: bool = False
    # The importance ratio is clipped from below to 1 - clip_low.
    clip_low: float = 0.2
    # The importance ratio is clipped from above to 1 + clip_high.
    clip_high: float = 0.2
    # Dual clip: with a negative advantage the loss is at most this times |advantage|; null: off.
    # For the losses that have no bound there: ppo_clip, gspo, gspo_token, gmpo and dppo.
    dual_clip: float | None = None
    # Temperature of sapo's gate for positive advantages.
    sapo_tau_positive: float = 1.0
    # Temperature of sapo's gate for the others.
    sapo_tau_negative: float = 1.05
    # Divergence that dppo bounds: total variation or KL.
    dppo_divergence: DppoDivergence = DppoDivergence.tv
    # Largest divergence of a token that dppo moves further away; null: 0.15 (tv), 0.05 nats (kl).
    dppo_threshold: float | None = None
    # Weight of the KL term against the reference model; 0 loads no reference.
    kl_coef: float = 0.0
    # Estimator of that KL: k1, k2, k3 or k3_unbiased.
    kl_estimator: str = "k3"
    # Where the KL stands: a term of the loss, or a cost of each token in the reward (with k1).
    kl_in: KlPlace = KlPlace.loss
    # Mean KL per token that kl_coef is steered to, in nats; null: kl_coef stays as it is.
    kl_target: float | None = None
    # Samples over which an error of 20 % from kl_target changes kl_coef by 20 %.
    kl_horizon_samples: int = 10000
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    # Weight of the entropy bonus; negative: entropy is pushed down.
    entropy_coef: float = 0.0
    # Entropy that entropy_coef is steered to, in nats per token; null: it stays as it is.
    entropy_target: float | None = None
    # How much a step changes entropy_coef on the way to entropy_target.
    entropy_coef_step: float = 0.005
    # Largest entropy_coef on the way to entropy_target.
    entropy_coef_max: float = 0.1
    # Share of the step's tokens that have a policy loss, those of highest entropy; 1: all. The
    # others still count in the denominators, and in the KL, entropy and value terms.
    entropy_top_share: float = 1.0
    # A minibatch whose mean importance ratio passes this is discarded whole; null: only when it
    # is not finite.
    early_stop_ratio: float | None = 5.0
    # After a discarded minibatch, discard the rest of the step's minibatches as well.
    early_stop_rest: bool = False
    # Log-probs before the update: recomputed by the actor, or the engine's own.
    old_log_probs: OldLogProbs = OldLogProbs.recompute
    # Responses cut off at the limit: keep them as they are, mask them out of the loss (their
    # rewards still count in their groups), take truncated_penalty off their rewards (penalise), or
    # multiply these by truncated_factor (scale), which suits rewards that are not negative.
    truncated: TruncatedRule = TruncatedRule.keep
    # What truncated=penalise takes off.
    truncated_penalty: float = 1.0
    # What truncated=scale multiplies by; 0: a truncated response has reward 0.
    truncated_factor: float = 0.0
    filter: FilterConfig = field(default_factory=FilterConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass
class OptimizerConfig:
    # Peak learning rate.
    lr: float = 2e-5
    # Learning rate at the end of linear and cosine schedules.
    min_lr: float = 0.0
    # Shape after warm-up.
    schedule: Schedule = Schedule.constant
    # Optimizer steps of linear warm-up from 0.
    warmup_steps: int = 0
    # Optimizer steps after which a decaying schedule rests at min_lr; null: the whole run.
    decay_steps: int | None = None
    # Decay of Adam's running mean of the gradient.
    adam_beta1: float = 0.9
    # Decay of Adam's running mean of the squared gradient.
    adam_beta2: float = 0.95
    # Added to the root of the latter.
    adam_eps: float = 1e-5
    # Decoupled weight decay (AdamW).
    weight_decay: float = 0.05
    # Largest norm of the gradient over all parameters.
    clip_grad_norm: float = 1.0


@dataclass
class ValueConfig:
    """The value model of algorithm.advantage=gae; it begins with the policy's weights."""

    # Discount per token; 1: when an answer comes does not matter.
    gamma: float = 1.0
    # GAE's lambda: 1 trusts rewards alone, 0 the value model alone.
    lam: float = 1.0
    # Largest move of a value in one step, in units of the reward; null: no bound.
    clip: float | None = None
    # Advantages of a step are shifted and scaled to mean 0 and standard deviation 1.
    whiten_advantages: bool = True
    # First steps in which the value model alone learns.
    warmup_steps: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class ActorConfig:
    # Ranks that share each layer's matrices.
    tensor_parallel: int = 1
    # Ranks that share the stack of layers.
    pipeline_parallel: int = 1
    # Ranks that share the tokens of each sequence, for sequences too long for one.
    context_parallel: int = 1
    # Copies of the model; null: all ranks of the cluster on CUDA, 1 on CPU.
    data_parallel: int | None = None
    # Ranks of a stage that share the experts of a mixture between them, whole ones; a divisor of
    # tensor_parallel x data_parallel. 1: each copy of the model has all, cut over its tensor ranks.
    expert_parallel: int = 1
    # Implementation of the layers: Transformer Engine's, or Megatron's own (local). auto takes
    # Transformer Engine on CUDA, and stops where it is missing or broken; on a CPU local.
    layers: Layers = Layers.auto
    # Split activations between tensor ranks along the sequence where matrices are not split.
    sequence_parallel: bool = False
    # Shard the optimizer's state over data-parallel ranks.
    distributed_optimizer: bool = True
    # Activations kept for the backward pass: all, all but attention's, or only layer inputs.
    recompute: Recompute = Recompute.none
    # With recompute=full: layers (of each stage) that are recomputed.
    recompute_num_layers: int | None = None
    # Token budget of a micro-batch, which context ranks share; one longer sequence forms a
    # micro-batch of its own.
    max_tokens_per_microbatch: int = 32768
    # CPU threads of each rank; null: the machine's cores shared between ranks.
    num_threads: int | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class RolloutConfig:
    # vLLM engines; null: as many as the accelerators allow on CUDA, 1 on CPU.
    engines: int | None = None
    # Tensor-parallel ranks of each engine.
    tensor_parallel: int = 1
    # Longest response, in tokens.
    max_response_tokens: int = 27648
    # Sampling temperature; the actor's log-probs are taken at the same one.
    temperature: float = 1.0
    # Go on after an end-of-sequence token, up to max_response_tokens: to measure at a fixed length.
    ignore_eos: bool = False
    # Sequences that one engine runs at once.
    max_running_sequences: int = 256
    # Share of a GPU's memory that vLLM may take (weights and KV cache). CUDA only.
    gpu_memory_utilization: float = 0.6
    # KV cache of each engine, in GiB. CPU only.
    cpu_kv_cache_gib: float = 1.0
    # Keep prompts' KV blocks for reuse within one weights version. On CPU only where a prompt may
    # have 128 tokens, which are a block there.
    prefix_caching: bool = True
    # Skip CUDA graphs.
    enforce_eager: bool = False
    # Tokens that an engine reads and decodes in one step at most; longer prompts are read in chunks
    # of this size. More takes more memory. CUDA only; a CPU engine reads each prompt whole.
    max_batched_tokens: int = 16384
    # Schedule each decode step while the one before runs, so that the GPU never waits for Python;
    # null: on with CUDA, off on CPU, where vLLM does not support it.
    async_scheduling: bool | None = None
    # Seconds without a token from an engine that has work, after which it counts as hung.
    stall_timeout_s: float = 600.0
    # Engines that may be started again, in one start of the run, after they died or hung.
    max_engine_restarts: int = 10


@dataclass
class WeightsConfig:
    # How weights go from the actor to the engines; auto: on CPU shared_memory on one node
    # and object_store (of Ray) on several; on CUDA ipc when they share a GPU, nccl otherwise.
    # nccl_m2n takes the place of nccl, with every rank sending its own shards; it needs NVIDIA's
    # nccl-extensions, and an actor without pipeline and expert parallelism.
    transport: Transport = Transport.auto
    # Tensors travel in buckets of about this size.
    bucket_size_mib: int = 512
    # Compare a checksum of every tensor in the engines with the actor's at the first update and at
    # every so many steps; a difference stops the run. 0: never.
    verify_every: int = 50


@dataclass
class RewardItem:
    # Registered name, import path (package.module:function) or file path (file.py:function).
    name: str = MISSING
    # Factor of this reward in the sum.
    weight: float = 1.0
    # Arguments of that reward.
    params: dict[str, Any] = field(default_factory=dict)
    # Name in the metrics; null: one made from name.
    label: str | None = None
    # A sample that this reward cannot score has no reward at all.
    required: bool = False


@dataclass
class RewardConfig:
    # Rewards; a sample's reward is their weighted sum.
    items: list[RewardItem] = field(default_factory=lambda: [RewardItem(name="math")])
    # The math reward of a right final answer.
    correct: float = 5.0
    # The math reward of any other, and of none.
    incorrect: float = -5.0
    # A reward that raises: stop the run, or count it and leave the sample unscored by it.
    on_error: OnRewardError = OnRewardError.stop
    # Where to look for an answer that is not boxed: nowhere, after a marker, or the last number.
    fallback: Fallback = Fallback.none
    # Worker processes that compare answers.
    num_workers: int = 2
    # Limit of one comparison.
    timeout_s: float = 1.5


@dataclass
class BenchmarkItem:
    # Name in the metrics; aime24, aime25, amc23, math500, gpqa_diamond, minerva, olympiadbench and
    # gsm8k are known, with their file, fields and published settings.
    name: str = MISSING
    # File with its problems; null: a known benchmark's file in eval.data_dir.
    path: str | None = None
    # Field that holds the problem; null: the known benchmark's, or data.prompt_key.
    prompt_key: str | None = None
    # Field that holds the accepted answer; null: the known benchmark's, or data.answer_key.
    answer_key: str | None = None
    # As data.apply_chat_template; null: with the published settings of a known benchmark, true if
    # the tokenizer has one; else that of data.
    apply_chat_template: bool | None = None
    # As data.prompt_template; null: with the published settings of a known benchmark, the problem
    # and "Please reason step by step, and put your final answer within \\boxed{}."; else that of
    # data.
    prompt_template: str | None = None
    # Samples per problem; null: as published, or eval.samples. So for the next three.
    samples: int | None = None
    # Sampling temperature; 0: greedy.
    temperature: float | None = None
    # Sample from the smallest set of tokens with this much probability.
    top_p: float | None = None
    # Longest response, in tokens.
    max_response_tokens: int | None = None
    # At most so many problems, the first ones; null: data.max_eval_problems.
    max_problems: int | None = None


@dataclass
class EvalConfig:
    # Benchmarks beside the problems of data.eval_paths.
    benchmarks: list[BenchmarkItem] = field(default_factory=list)
    # Folder with the files of known benchmarks; toolkits/prepare_data.py fetches them.
    data_dir: str = "datasets/benchmarks"
    # Known benchmarks take the samples, temperature, top-p, length and prompt that results are
    # published with; false: those below and of data.
    published_settings: bool = True
    # rlmath evaluate: a checkpoint of a run (checkpoints/step_000050) whose weights are evaluated;
    # model.path gives sizes and tokenizer. null: the weights in model.path.
    checkpoint: str | None = None
    # Evaluate before the first step and every so many steps; 0: never.
    every: int = 10
    # Samples per held-out problem.
    samples: int = 1
    # Sampling temperature; 0: greedy.
    temperature: float = 0.6
    # Sample from the smallest set of tokens with this much probability; 1: from all.
    top_p: float = 0.95
    # Longest response, in tokens; null: rollout.max_response_tokens.
    max_response_tokens: int | None = None


@dataclass
class AlignmentConfig:
    # Judge how far engine and actor are apart before the first update and in every so manieth
    # step; 0: never, it is only measured.
    every: int = 1
    # Largest mean of exp|logp_actor - logp_engine|; null: 1.0001 in float32, 1.02 in bfloat16, 1.05
    # in bfloat16 for a mixture of experts.
    max_mean_exp_abs_diff: float | None = None
    # Further apart than that, or an identity of the update broken (a ratio of 1, a KL of 0): stop
    # the run, or warn and go on.
    on_fail: OnMisalignment = OnMisalignment.stop


@dataclass
class ClusterConfig:
    # Where the actor and the engines run.
    device: Device = Device.auto
    # Machines of the cluster.
    nodes: int = 1
    # Accelerators of one node; ignored on CPU.
    gpus_per_node: int = 8
    # Engines on the actor's GPUs (they take turns), or on GPUs of their own; in a cluster of CPU
    # nodes: on the actor's nodes, or on nodes of their own.
    placement: Placement = Placement.colocated
    # Address of a running Ray cluster; null: start one for this run on this machine.
    ray_address: str | None = None
    # Ray's object store, in MiB; null: Ray's choice.
    object_store_mib: int | None = None


@dataclass
class SftConfig:
    # Files with worked examples, read by data.prompt_key and response_key.
    train_paths: list[str] = field(default_factory=list)
    # Field that holds the worked solution.
    response_key: str = "response"
    # Optimizer steps.
    steps: int = 300
    # Sequences per optimizer step.
    sequences_per_step: int = 64
    # Save a checkpoint, to sft_checkpoints, every so many steps and after the last, and continue
    # from the newest as runner.resume says; 0: neither.
    save_every: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class RunnerConfig:
    # Everything that the run leaves goes here.
    run_dir: str = MISSING
    # Optimization steps (rollouts) of the run.
    steps: int = 1000
    # Seed of everything random but the data's order.
    seed: int = 0
    # Save a checkpoint every so many steps and after the last; 0: only after the last.
    save_every: int = 50
    # Newest checkpoints that are kept.
    keep_checkpoints: int = 3
    # Metric whose best checkpoint is kept beside the newest, such as eval/accuracy or
    # eval/aime24/pass_at_8: the highest value of those saved; null: none.
    best_metric: str | None = None
    # The best is the lowest value of best_metric.
    best_is_lowest: bool = False
    # Write checkpoints while training goes on, from a copy in host memory.
    background_checkpoints: bool = False
    # Starts from the last checkpoint after a rank or an engine has failed for good, without a new
    # checkpoint between; 0: the run ends.
    max_restarts: int = 3
    # Continue from the newest whole checkpoint in run_dir (auto), start anew (never), or continue
    # from the checkpoint whose folder this is.
    resume: str = "auto"
    # Settings or sections of model, algorithm and reward that a resume may change, such as
    # [algorithm.loss,reward]; any other change of those is an error.
    accept_changes: list[str] = field(default_factory=list)
    # Write every sample of so many steps to samples/; 1: of each step.
    samples_every: int = 1
    # Sampled responses shown as text in TensorBoard per step.
    tensorboard_samples: int = 4
    # After the run, compare the actor's log-probs with those of the exported folder in
    # transformers, on so many sequences; 0: not at all.
    check_export_sequences: int = 0
    # Live display in the terminal; null: when it is one.
    progress: bool | None = None


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    collapse: CollapseConfig = field(default_factory=CollapseConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
