"""Every setting, its type, its default and what it does. Hydra composes ``conf/`` onto these.

A setting is documented on the line above it. ``MISSING`` (``???`` in a file) has to be given.
Ranges and combinations are checked in ``rlmath/checks/run.py``.
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


class CompletionFormat(Enum):
    text = "text"
    chat = "chat"


class OnMisalignment(Enum):
    stop = "stop"
    warn = "warn"


class OnRewardError(Enum):
    stop = "stop"
    skip = "skip"


@dataclass
class ModelConfig:
    # Hugging Face folder with config.json, tokenizer and safetensors. "tiny" creates a random model
    # with 0.66 million parameters in run_dir.
    path: str = MISSING
    # Data type of weights and activations in the actor and the engines.
    dtype: DType = DType.bfloat16
    # Expected architecture, such as Qwen2ForCausalLM; null accepts what config.json says.
    architecture: str | None = None


@dataclass
class DataConfig:
    # Training problems: .jsonl, .json or .parquet files, or Hugging Face datasets written as
    # hub:ORGANIZATION/NAME:CONFIGURATION:SPLIT.
    train_paths: list[str] = field(default_factory=list)
    # Sampling weight of each entry of train_paths, independent of its number of rows; empty: all
    # rows count equally.
    train_weights: list[float] = field(default_factory=list)
    # Files with held-out problems; empty: no evaluation.
    eval_paths: list[str] = field(default_factory=list)
    # Field with the prompt: a string, or a list of chat messages (with apply_chat_template).
    prompt_key: str = "prompt"
    # Field with the accepted answer or a list of accepted answers.
    answer_key: str = "solutions"
    # Apply the tokenizer's chat template; a string becomes one user message.
    apply_chat_template: bool = False
    # System message of every prompt; requires apply_chat_template.
    system_prompt: str | None = None
    # Template that contains {prompt}, applied before tokenization.
    prompt_template: str | None = None
    # Maximum prompt length, in tokens.
    max_prompt_tokens: int = 1024
    # Longer prompts: stop before the run, or filter (skip and count).
    overlong_prompts: OverlongPrompt = OverlongPrompt.filter
    # Malformed rows: stop with file, line and field, or skip and count.
    malformed_rows: MalformedRow = MalformedRow.stop
    # Shuffle the training problems in each epoch.
    shuffle: bool = True
    # Seed of the data order.
    seed: int = 0
    # Maximum number of held-out problems, taken from the start; null: all.
    max_eval_problems: int | None = None


@dataclass
class AlgorithmConfig:
    # Problems sampled per step.
    prompts_per_step: int = 512
    # Samples per problem.
    group_size: int = 16
    # Optimizer steps per rollout; the sequences of a step are split into this many minibatches.
    minibatches_per_step: int = 4
    # Advantage estimator; see rlmath/algorithms/advantages/.
    advantage: str = "grpo"
    # grpo: use the mean of the group's other samples as the baseline.
    leave_one_out: bool = False
    # grpo: use the standard deviation of the group's other samples; where these are all equal, the
    # difference from the baseline is not divided.
    leave_one_out_std: bool = False
    # Added to the standard deviation that advantages are divided by.
    advantage_epsilon: float = 1e-6
    # Whiten advantages over all response tokens of the step after the estimator.
    whiten_tokens: bool = False
    # k of the pass_at_k estimator: the number of samples of which one must be correct.
    pass_at_k: int = 4
    # Policy loss; see rlmath/algorithms/losses/.
    loss: str = "ppo_clip"
    # How token losses are aggregated; see rlmath/algorithms/aggregation.py.
    aggregation: str = "token_mean"
    # Divisor of seq_sum_constant, in tokens; null: rollout.max_response_tokens.
    aggregation_constant_tokens: int | None = None
    # Allow an aggregation that the loss is not defined for; the result is not the published method.
    allow_other_aggregation: bool = False
    # Lower clip range: the importance ratio is clipped at 1 - clip_low.
    clip_low: float = 0.2
    # Upper clip range: the importance ratio is clipped at 1 + clip_high.
    clip_high: float = 0.2
    # Dual clip: for negative advantages the loss is at most this times |advantage|; null: off. Only
    # with losses that are unbounded there: ppo_clip, gspo, gspo_token, gmpo and dppo.
    dual_clip: float | None = None
    # sapo: gate temperature for positive advantages.
    sapo_tau_positive: float = 1.0
    # sapo: gate temperature for negative advantages.
    sapo_tau_negative: float = 1.05
    # dppo: divergence that is bounded, total variation (tv) or KL (kl).
    dppo_divergence: DppoDivergence = DppoDivergence.tv
    # dppo: maximum divergence of a token whose update would increase it; null: 0.15 (tv) or 0.05
    # nats (kl).
    dppo_threshold: float | None = None
    # Coefficient of the KL penalty against the reference model; 0: no reference model is loaded.
    kl_coef: float = 0.0
    # KL estimator: k1, k2, k3 or k3_unbiased.
    kl_estimator: str = "k3"
    # Add the KL penalty to the loss, or subtract it from the reward of each token (k1 only).
    kl_in: KlPlace = KlPlace.loss
    # Adapt kl_coef towards this mean KL per token, in nats; null: kl_coef is constant.
    kl_target: float | None = None
    # Number of samples over which a 20 % deviation from kl_target changes kl_coef by 20 %.
    kl_horizon_samples: int = 10000
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    # Coefficient of the entropy bonus; negative values decrease entropy.
    entropy_coef: float = 0.0
    # Adapt entropy_coef towards this entropy, in nats per token; null: entropy_coef is constant.
    entropy_target: float | None = None
    # Change of entropy_coef per step while adapting to entropy_target.
    entropy_coef_step: float = 0.005
    # Maximum entropy_coef while adapting to entropy_target.
    entropy_coef_max: float = 0.1
    # Fraction of the step's tokens, those with the highest entropy, that have a policy loss; 1:
    # all. The other tokens still count in denominators and in the KL, entropy and value terms.
    entropy_top_share: float = 1.0
    # Discard a minibatch whose mean importance ratio exceeds this; null: discard only non-finite
    # minibatches.
    early_stop_ratio: float | None = 5.0
    # Also discard the remaining minibatches of the step after a discarded one.
    early_stop_rest: bool = False
    # Old log-probs: recomputed by the actor before the update, or taken from the engine.
    old_log_probs: OldLogProbs = OldLogProbs.recompute
    # Truncated responses: keep, mask out of the loss (their rewards still count in their groups),
    # subtract truncated_penalty from their rewards (penalise), or multiply their rewards by
    # truncated_factor (scale), which suits non-negative rewards.
    truncated: TruncatedRule = TruncatedRule.keep
    # Amount that truncated=penalise subtracts.
    truncated_penalty: float = 1.0
    # Factor of truncated=scale; 0: truncated responses have reward 0.
    truncated_factor: float = 0.0
    filter: FilterConfig = field(default_factory=FilterConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass
class OptimizerConfig:
    # Peak learning rate.
    lr: float = 2e-5
    # Final learning rate of linear and cosine schedules.
    min_lr: float = 0.0
    # Learning-rate schedule after warm-up.
    schedule: Schedule = Schedule.constant
    # Optimizer steps of linear warm-up from 0.
    warmup_steps: int = 0
    # Optimizer steps until a decaying schedule reaches min_lr; null: the whole run.
    decay_steps: int | None = None
    # Adam's beta1.
    adam_beta1: float = 0.9
    # Adam's beta2.
    adam_beta2: float = 0.95
    # Adam's epsilon.
    adam_eps: float = 1e-5
    # Decoupled weight decay (AdamW).
    weight_decay: float = 0.05
    # Maximum global gradient norm.
    clip_grad_norm: float = 1.0


@dataclass
class ValueConfig:
    """The value model of algorithm.advantage=gae; it begins with the policy's weights."""

    # Discount per token.
    gamma: float = 1.0
    # Lambda of GAE: 1 uses rewards only (Monte Carlo), 0 bootstraps from the value model only.
    lam: float = 1.0
    # Maximum change of a value per step, in units of the reward; null: unbounded.
    clip: float | None = None
    # Normalize the advantages of a step to mean 0 and standard deviation 1.
    whiten_advantages: bool = True
    # Steps at the start in which only the value model is trained.
    warmup_steps: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class ActorConfig:
    # Tensor-parallel size.
    tensor_parallel: int = 1
    # Pipeline-parallel size.
    pipeline_parallel: int = 1
    # Context-parallel size: ranks that share the tokens of each sequence.
    context_parallel: int = 1
    # Data-parallel size; null: all remaining ranks on CUDA, 1 on CPU.
    data_parallel: int | None = None
    # Expert-parallel size of a MoE model, a divisor of tensor_parallel x data_parallel; each expert
    # is whole on its rank. 1: every model copy has all experts, split over its tensor-parallel
    # ranks.
    expert_parallel: int = 1
    # Layer implementation: Transformer Engine, or Megatron's own (local). auto uses Transformer
    # Engine on CUDA and fails if it is missing or broken; on CPU it uses local.
    layers: Layers = Layers.auto
    # Split activations along the sequence between tensor-parallel ranks where matrices are not
    # split.
    sequence_parallel: bool = False
    # Shard the optimizer state over data-parallel ranks.
    distributed_optimizer: bool = True
    # Activation recomputation: none, selective (attention), or full (whole layers).
    recompute: Recompute = Recompute.none
    # recompute=full: number of recomputed layers per pipeline stage; null: all.
    recompute_num_layers: int | None = None
    # Maximum tokens per micro-batch, shared by its context-parallel ranks. A longer sequence forms
    # a micro-batch alone.
    max_tokens_per_microbatch: int = 32768
    # CPU threads per rank; null: all cores divided between the ranks.
    num_threads: int | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class RolloutConfig:
    # Number of vLLM engines; null: as many as the accelerators allow on CUDA, 1 on CPU.
    engines: int | None = None
    # Tensor-parallel size of each engine.
    tensor_parallel: int = 1
    # Maximum response length, in tokens.
    max_response_tokens: int = 27648
    # Sampling temperature; the actor computes log-probs at the same temperature.
    temperature: float = 1.0
    # Continue after an end-of-sequence token up to max_response_tokens, to benchmark a fixed
    # length.
    ignore_eos: bool = False
    # Maximum number of concurrent sequences per engine.
    max_running_sequences: int = 256
    # Fraction of GPU memory that vLLM may use for weights and KV cache. CUDA only.
    gpu_memory_utilization: float = 0.6
    # KV cache size per engine, in GiB. CPU only.
    cpu_kv_cache_gib: float = 1.0
    # Reuse the KV cache of common prompt prefixes within one weight version. On CPU, only if
    # prompts may have 128 tokens, the block size there.
    prefix_caching: bool = True
    # Disable CUDA graphs.
    enforce_eager: bool = False
    # Maximum tokens per engine step; longer prompts are prefilled in chunks. More needs more
    # memory. CUDA only; CPU engines prefill each prompt at once.
    max_batched_tokens: int = 16384
    # Schedule each decode step while the previous one runs, so the GPU does not wait for Python;
    # null: on with CUDA, off on CPU, where vLLM does not support it.
    async_scheduling: bool | None = None
    # An engine that has work and generates no token for this many seconds is considered hung.
    stall_timeout_s: float = 600.0
    # Maximum number of engine restarts after a crash or hang, per start of the run.
    max_engine_restarts: int = 10


@dataclass
class WeightsConfig:
    # Transport of the weight sync. auto: shared_memory on one CPU node, object_store (Ray) on
    # several, ipc on CUDA if engines share the actor's GPUs, nccl otherwise. nccl_m2n replaces
    # nccl: every rank sends its own shards; it requires nccl-extensions and no pipeline or expert
    # parallelism.
    transport: Transport = Transport.auto
    # Bucket size of the weight sync.
    bucket_size_mib: int = 512
    # Compare a fingerprint of every tensor in the engines with the actor's at the first weight sync
    # and every N steps; a difference stops the run. 0: never.
    verify_every: int = 50


@dataclass
class RewardItem:
    # Registered name, import path (package.module:function) or file path (file.py:function).
    name: str = MISSING
    # Weight of this reward in the sum.
    weight: float = 1.0
    # Arguments of the reward.
    params: dict[str, Any] = field(default_factory=dict)
    # Name in metrics; null: derived from name.
    label: str | None = None
    # A sample that this reward cannot score gets no reward at all.
    required: bool = False
    # What a function from elsewhere gets as completions: strings (text) or lists of messages
    # (chat); null: chat with data.apply_chat_template, otherwise text.
    completion_format: CompletionFormat | None = None
    # Call it with all completions of a problem at once; null: as the reward declares, and true for
    # a function that does not say.
    needs_group: bool | None = None


@dataclass
class RewardConfig:
    # Rewards; the reward of a sample is their weighted sum.
    items: list[RewardItem] = field(default_factory=lambda: [RewardItem(name="math")])
    # Reward of a correct final answer.
    correct: float = 5.0
    # Reward of an incorrect or missing final answer.
    incorrect: float = -5.0
    # A reward function that raises: stop the run, or count it and leave the sample unscored (none).
    on_error: OnRewardError = OnRewardError.stop
    # Where to search for an answer that is not boxed: none, after a marker, or the last number.
    fallback: Fallback = Fallback.none
    # Worker processes of the grader.
    num_workers: int = 2
    # Time limit of one comparison, in seconds.
    timeout_s: float = 1.5


@dataclass
class BenchmarkItem:
    # Name in metrics. aime24, aime25, amc23, math500, gpqa_diamond, minerva, olympiadbench and
    # gsm8k are built in, with their file, fields and published settings.
    name: str = MISSING
    # Problem file; null: the built-in benchmark's file in eval.data_dir.
    path: str | None = None
    # Field with the problem; null: the built-in benchmark's, or data.prompt_key.
    prompt_key: str | None = None
    # Field with the accepted answer; null: the built-in benchmark's, or data.answer_key.
    answer_key: str | None = None
    # Like data.apply_chat_template; null: for published settings true if the tokenizer has a
    # template, otherwise the value of data.
    apply_chat_template: bool | None = None
    # Like data.prompt_template; null: for published settings the problem followed by "Please reason
    # step by step, and put your final answer within \\boxed{}.", otherwise the value of data.
    prompt_template: str | None = None
    # Samples per problem; null: the published number, or eval.samples. The same applies to the next
    # three.
    samples: int | None = None
    # Sampling temperature; 0: greedy.
    temperature: float | None = None
    # Top-p (nucleus) sampling.
    top_p: float | None = None
    # Maximum response length, in tokens.
    max_response_tokens: int | None = None
    # Maximum number of problems, taken from the start; null: data.max_eval_problems.
    max_problems: int | None = None


@dataclass
class EvalConfig:
    # Benchmarks in addition to the problems of data.eval_paths.
    benchmarks: list[BenchmarkItem] = field(default_factory=list)
    # Folder with the files of built-in benchmarks; toolkits/prepare_data.py downloads them.
    data_dir: str = "datasets/benchmarks"
    # Evaluate built-in benchmarks with their published samples, temperature, top-p, length and
    # prompt; false: use the settings below and those of data.
    published_settings: bool = True
    # rlmath evaluate: checkpoint (checkpoints/step_000050) to evaluate; model.path gives
    # architecture and tokenizer. null: evaluate model.path.
    checkpoint: str | None = None
    # Evaluate before the first step and every N steps; 0: never.
    every: int = 10
    # Samples per held-out problem.
    samples: int = 1
    # Sampling temperature; 0: greedy.
    temperature: float = 0.6
    # Top-p (nucleus) sampling; 1: off.
    top_p: float = 0.95
    # Maximum response length, in tokens; null: rollout.max_response_tokens.
    max_response_tokens: int | None = None


@dataclass
class AlignmentConfig:
    # Check trainer-engine log-prob agreement before the first update and every N steps; 0: measure
    # only, never fail.
    every: int = 1
    # Maximum mean of exp|logp_actor - logp_engine|; null: 1.0001 in float32, 1.02 in bfloat16, 1.05
    # in bfloat16 for MoE models.
    max_mean_exp_abs_diff: float | None = None
    # If that limit is exceeded or an invariant of the update is violated (ratio 1, KL 0): stop the
    # run, or warn and continue.
    on_fail: OnMisalignment = OnMisalignment.stop


@dataclass
class ClusterConfig:
    # Device of the actor and the engines.
    device: Device = Device.auto
    # Number of nodes.
    nodes: int = 1
    # GPUs per node; ignored on CPU.
    gpus_per_node: int = 8
    # colocated: engines and actor share GPUs and take turns; separate: each has its own GPUs. On
    # CPU clusters the same applies to nodes.
    placement: Placement = Placement.colocated
    # Address of a running Ray cluster; null: start one for this run on this machine.
    ray_address: str | None = None
    # Size of Ray's object store, in MiB; null: Ray's default.
    object_store_mib: int | None = None


@dataclass
class SftConfig:
    # Files with worked examples, read with data.prompt_key and response_key.
    train_paths: list[str] = field(default_factory=list)
    # Field with the worked solution.
    response_key: str = "response"
    # Optimizer steps.
    steps: int = 300
    # Sequences per optimizer step.
    sequences_per_step: int = 64
    # Save a checkpoint to sft_checkpoints every N steps and after the last, and resume from the
    # newest according to runner.resume; 0: no checkpoints.
    save_every: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class RunnerConfig:
    # Output folder of the run.
    run_dir: str = MISSING
    # Number of training steps (rollouts).
    steps: int = 1000
    # Random seed of everything except the data order.
    seed: int = 0
    # Save a checkpoint every N steps and after the last; 0: only after the last.
    save_every: int = 50
    # Number of newest checkpoints to keep.
    keep_checkpoints: int = 3
    # Also keep the checkpoint with the best value of this metric, such as eval/accuracy or
    # eval/aime24/pass_at_8; null: off.
    best_metric: str | None = None
    # The lowest value of best_metric is best.
    best_is_lowest: bool = False
    # Write checkpoints in the background from a copy in host memory.
    background_checkpoints: bool = False
    # Maximum number of automatic restarts from the last checkpoint after a rank or engine failed,
    # without a new checkpoint in between; 0: never restart.
    max_restarts: int = 3
    # auto: resume from the newest complete checkpoint in run_dir; never: start over; a checkpoint
    # folder: resume from it.
    resume: str = "auto"
    # Settings or sections of model.path, algorithm and reward that a resumed run may change, such
    # as [algorithm.loss,reward]; any other change of these is an error.
    accept_changes: list[str] = field(default_factory=list)
    # Write all samples to samples/ every N steps.
    samples_every: int = 1
    # Sampled responses shown as text in TensorBoard per step.
    tensorboard_samples: int = 4
    # After the run, compare the actor's log-probs with transformers on the exported model for this
    # many sequences; 0: off.
    check_export_sequences: int = 0
    # Live progress display; null: on if the output is a terminal.
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
