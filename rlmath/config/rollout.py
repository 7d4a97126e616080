"""Settings of ``rollout``: the vLLM engines and sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rlmath.utils.setting import NotWith, OnlyWith, setting

RolloutSchedule = StrEnum(
    "RolloutSchedule", ["synchronous", "carry_over", "pipelined", "continuous"]
)
ToolFormat = StrEnum("ToolFormat", ["fenced", "chat"])
KvAtSync = StrEnum("KvAtSync", ["recompute", "keep"])
Quantization = StrEnum("Quantization", ["none", "fp8"])
KvCacheDtype = StrEnum("KvCacheDtype", ["auto", "fp8"])
_TOOLS = OnlyWith("tools", words="a list of tools", also="rollout.environment")
_PYTHON = OnlyWith("tools", ("python",))


@dataclass
class RolloutConfig:
    engines: int | None = setting(
        None,
        "Number of vLLM engines; null: as many as the accelerators allow on CUDA, 1 on CPU, where "
        "each has one thread.",
        least=1,
    )
    tensor_parallel: int = setting(1, "Tensor-parallel size of each engine.", least=1)
    max_response_tokens: int = setting(
        27648, "Maximum response length, in tokens.", least=1, common=True
    )
    temperature: float = setting(
        1.0,
        "Sampling temperature; the actor computes log-probs at the same temperature.",
        above=0,
        common=True,
    )
    ignore_eos: bool = setting(
        False,
        "Continue after an end-of-sequence token up to max_response_tokens, to benchmark a fixed "
        "length.",
    )
    imposed_mean_tokens: int | None = setting(
        None,
        "Mean of the lengths to which responses are sampled, log-normal and truncated at "
        "max_response_tokens, to benchmark a distribution of lengths. null: all have "
        "max_response_tokens.",
        least=1,
        only_with=OnlyWith("ignore_eos", (True,)),
    )
    tools: list[str] = setting(
        list,
        "Tools that the model may call between its turns: python, which runs code in a sandbox, "
        "and your own functions, as my_module:search or file.py:search. Empty: each response is "
        "one turn.",
    )
    environment: str | None = setting(
        None,
        "Your own environment, which answers the model's turns: a class, as my_module:MyEnv or "
        "file.py:MyEnv; null: none.",
    )
    environment_options: dict[str, Any] = setting(dict, "Options of environment.")
    tool_format: ToolFormat = setting(
        ToolFormat.fenced,
        "How the model calls tools. fenced: in fenced blocks of plain text; chat: as its chat "
        "template shows, which then lists the tools in the prompt.",
        only_with=_TOOLS,
    )
    tool_parser: str | None = setting(
        None,
        "How calls stand in a chat; null: as the template shows, in one of the first two. hermes: "
        "as JSON in <tool_call>; llama3_json: as JSON alone; or one of vLLM's parsers, as vllm "
        "serve --tool-call-parser takes it, such as qwen3_coder.",
        only_with=OnlyWith("tool_format", (ToolFormat.chat,)),
    )
    python_session: bool = setting(
        False,
        "Let a response's Python calls use what its earlier calls defined; false: each call is a "
        "new program.",
        only_with=_PYTHON,
    )
    python_provider: str = setting(
        "local",
        "Where Python calls run: local (sandboxes of the driver's machine), piston, e2b, morph, or "
        "package.module:Class, as for code rewards.",
        only_with=_PYTHON,
    )
    python_provider_settings: dict[str, Any] = setting(
        dict, "Settings of python_provider.", only_with=_PYTHON
    )
    max_turns: int = setting(
        8,
        "Maximum turns of the model in a response; one whose last turn still calls a tool is "
        "truncated.",
        least=1,
        only_with=_TOOLS,
    )
    max_calls: int = setting(
        16, "Maximum calls of a response; further ones are refused.", least=1, only_with=_TOOLS
    )
    call_timeout_s: float = setting(
        10.0, "Longest time of a call, in seconds.", above=0, only_with=_TOOLS
    )
    tools_timeout_s: float = setting(
        300.0,
        "Longest time of all calls of a response together, in seconds; then it is truncated.",
        above=0,
        only_with=_TOOLS,
    )
    max_observation_tokens: int = setting(
        512,
        "Longest output of a turn, in tokens, shared by its calls; the middle of a longer one is "
        "left out. Outputs count in max_response_tokens.",
        least=64,
        only_with=_TOOLS,
    )
    parallel_calls: int | None = setting(
        None, "Number of concurrent calls; null: the number of CPUs.", least=1, only_with=_TOOLS
    )
    max_running_sequences: int = setting(
        256, "Maximum number of concurrent sequences per engine.", least=1
    )
    gpu_memory_utilization: float = setting(
        0.6,
        "Fraction of GPU memory that vLLM may use for weights and KV cache. CUDA only.",
        above=0,
        most=1,
        common=True,
    )
    quantization: Quantization = setting(
        Quantization.none,
        "fp8: engines multiply the matrices of layers in FP8, which vLLM quantizes at each weight "
        "sync, with a scale for each output channel and for each token. Needs "
        "algorithm.correction; dense models only.",
        not_with=(
            NotWith("model.dtype=float32", "vLLM quantizes models of 16 bits", "use bfloat16"),
            NotWith(
                "precision.batch_invariant=true",
                "vLLM computes with the matrices widened again, and nothing would be gained",
                "use one of the two",
            ),
        ),
    )
    kv_cache_dtype: KvCacheDtype = setting(
        KvCacheDtype.auto,
        "fp8: engines keep keys and values in FP8 (e4m3, as they are, without a scale), so that "
        "the same memory holds twice as many tokens; auto: in model.dtype. Needs "
        "algorithm.correction.",
        not_with=(
            NotWith(
                "model.dtype=float32", "the gate's limits are of models in bfloat16", "use bfloat16"
            ),
            NotWith(
                "precision.batch_invariant=true",
                "attention with a cache in FP8 has not been compared with it",
                "use one of the two",
            ),
        ),
    )
    cpu_kv_cache_gib: float = setting(1.0, "KV cache size per engine, in GiB. CPU only.", above=0)
    prefix_caching: bool = setting(
        True,
        "Reuse the KV cache of common prompt prefixes within one weight version. On CPU, only if "
        "prompts may have 128 tokens, the block size there.",
    )
    enforce_eager: bool = setting(False, "Disable CUDA graphs.")
    max_batched_tokens: int = setting(
        16384,
        "Maximum tokens per engine step; longer prompts are prefilled in chunks. More needs more "
        "memory. CUDA only; CPU engines prefill each prompt at once.",
        least=1,
    )
    schedule: RolloutSchedule | None = setting(
        None,
        "Name of a pair of max_lag and cut_after_tokens; null: as these say. synchronous, 0 and "
        "null: each step samples its groups to the end with one version of the weights; "
        "carry_over, 2 and a quarter of max_response_tokens: a step trains on the oldest groups "
        "that are finished, and the others continue in the next step with its weights; pipelined, "
        "1 and null: engines on separate GPUs sample the next step's groups while the actor trains "
        "on this one's; continuous, 2 and 0: engines on separate GPUs never wait for the actor, "
        "and new weights come in the middle of responses.",
    )
    max_lag: int | None = setting(
        None,
        "A group is trained at most this many steps after the one that admitted it; the step waits "
        "for it. null: that of schedule; without one, 2 with cut_after_tokens, else 0. 0: as "
        "synchronous.",
        least=0,
        most=100,
    )
    cut_after_tokens: int | None = setting(
        None,
        "Maximum tokens that a step adds to a response before it is continued with newer weights. "
        "0: it is cut whenever new weights come; null: that of schedule; without one, no response "
        "is cut.",
        least=0,
    )
    allow_uncorrected: bool = setting(
        False,
        "Allow tokens of older weights without algorithm.correction, or with a loss whose "
        "importance ratio is not bounded.",
    )
    kv: KvAtSync = setting(
        KvAtSync.recompute,
        "Keys and values of unfinished responses when new weights come. recompute: the new weights "
        "compute them again; keep: the old ones stay, which saves that time; log-probs then are "
        "those of no single version. With continuous only.",
        not_with=NotWith(
            "rollout.prefix_caching=false",
            "what is kept is kept in the prefix cache",
            "use rollout.prefix_caching=true",
        ),
    )
    async_scheduling: bool | None = setting(
        None,
        "Schedule each decode step while the previous one runs, so the GPU does not wait for "
        "Python; null: on with CUDA, off on CPU, where vLLM does not support it.",
        not_with=NotWith(
            "cluster.device=cpu",
            "vLLM does not support it there",
            "set it to null, which turns it on with CUDA",
            "true",
        ),
    )
    short_steps: bool | None = setting(
        None,
        "Schedule decode-only steps in rlmath's short path, which takes a quarter of the host's "
        "time per sequence and step, instead of vLLM's; null: on CPU alone, as it has not run on a "
        "GPU.",
        not_with=(
            NotWith(
                "rollout.async_scheduling=false",
                "the short path on GPUs schedules ahead",
                "set it to null, or rollout.async_scheduling=true",
                "true",
            ),
            NotWith(
                "actor.routing_replay=engine",
                "vLLM's own path alone returns routes, so it would be taken in every step",
                "set it to null",
                "true",
            ),
        ),
    )
    flashinfer: bool = setting(
        False,
        "Use FlashInfer's kernels for top-k and top-p sampling, all-reduces and FP8 products. They "
        "are compiled at first use, which takes minutes; an engine without nvcc does not start. "
        "CUDA only.",
        not_with=NotWith("cluster.device=cpu", "its kernels are for GPUs", "set it to false"),
    )
    engine_arguments: str | None = setting(
        None, "Your own function that returns further arguments of vLLM's engines; null: none."
    )
    engine_options: dict[str, Any] = setting(dict, "Options of engine_arguments.")
    stall_timeout_s: float = setting(
        600.0,
        "An engine that has work and generates no token for this many seconds is considered hung.",
        above=0,
    )
    max_engine_restarts: int = setting(
        10,
        "Maximum number of engine restarts after a crash or hang, per start of the run.",
        least=0,
    )


@dataclass(frozen=True)
class Overlap:
    """How sampling and training overlap."""

    max_lag: int = 0  # A group is trained at most this many steps after the one that admitted it.
    # Tokens that a step adds to a response before it is continued with newer weights; 0: until new
    # weights come; None: no response is cut.
    cut_after_tokens: int | None = None

    @property
    def is_beside(self) -> bool:
        """Whether engines sample while the actor trains, and therefore need their own GPUs."""
        return self.max_lag > 0 and not self.cut_after_tokens

    @property
    def cuts_at_sync(self) -> bool:
        """Whether engines sample until new weights come, in the middle of responses."""
        return self.max_lag > 0 and self.cut_after_tokens == 0

    @property
    def budget_tokens(self) -> int | None:
        """Tokens that a step adds to a response that it need not finish; ``None``: no limit."""
        return self.cut_after_tokens or None if self.max_lag else None

    @property
    def cuts(self) -> bool:
        return self.max_lag > 0 and self.cut_after_tokens is not None

    @property
    def name(self) -> RolloutSchedule:
        if not self.max_lag:
            return RolloutSchedule.synchronous
        if self.cut_after_tokens is None:
            return RolloutSchedule.pipelined
        return RolloutSchedule.carry_over if self.cut_after_tokens else RolloutSchedule.continuous


def overlap_of(rollout: RolloutConfig) -> Overlap:
    """The numbers of ``rollout.schedule``, unless they are given."""
    quarter = -(-rollout.max_response_tokens // 4)
    named = {
        None: Overlap(0 if rollout.cut_after_tokens is None else 2),
        RolloutSchedule.synchronous: Overlap(),
        RolloutSchedule.carry_over: Overlap(2, quarter),
        RolloutSchedule.pipelined: Overlap(1),
        RolloutSchedule.continuous: Overlap(2, 0),
    }[rollout.schedule]
    given = {
        name: value
        for name in ("max_lag", "cut_after_tokens")
        if (value := getattr(rollout, name)) is not None
    }
    return replace(named, **given)


def keeps_kv(rollout: RolloutConfig) -> bool:
    """Whether responses are continued from keys and values of older weights."""
    return rollout.kv is KvAtSync.keep and overlap_of(rollout).cuts_at_sync


def has_turns(rollout: RolloutConfig) -> bool:
    """Whether a response may have several turns."""
    return bool(rollout.tools) or rollout.environment is not None
