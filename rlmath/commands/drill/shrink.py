"""A configuration for a cluster as one for two CPU cores: model, lengths, groups, layout.

What the user chose of algorithm, optimizer, types, rewards and checks stays. The shrunk settings
are composed from the same files with more overrides, so values that follow from others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.algorithms.advantages import AdvantageSettings, needs_value_model
from rlmath.config.groups import options
from rlmath.config.load import compose_settings
from rlmath.config.quoting import override, path_override
from rlmath.config.runner import RunnerConfig
from rlmath.config.schema import Config, Device, DType, Recompute
from rlmath.config.settings import by_key, value_of
from rlmath.errors import UserError
from rlmath.model.folder import TINY
from rlmath.model.published import KNOWN, VERSIONS
from rlmath.model.spec import CONFIG_FILE, model_spec, read_config
from rlmath.model.tiny import tiny_config
from rlmath.model.tiny_tokenizer import VOCABULARY_SIZE

MODEL, DATA = "model", "problems.jsonl"
# So that the prompts have whole blocks of the engine's prefix cache, of 128 tokens on a CPU.
PROMPT_TOKENS = 320
RESPONSE_TOKENS = 32
HIDDEN, HEADS, HEAD_DIM, LAYERS, EXPERTS = 128, 4, 32, 4, 4
# Rewards that the drill's problems have all columns for.
REWARDS = (
    *("accuracy", "cosine", "format", "length", "math", "reasoning_steps"),
    *("repetition_penalty", "soft_overlong_punishment", "stop_properly", "tag_count"),
)


@dataclass(frozen=True)
class Shrunk:
    config: Config
    model: dict[str, Any]  # Contents of the model's config.json.
    notes: tuple[str, ...]
    changed: frozenset[str] = frozenset()  # Keys of the settings that are not the user's.
    lr_factor: float = 1.0  # Factor of the user's learning rate.


def shrink(
    words: Sequence[str],
    folder: Path,
    config_dir: str | None,
    steps: int,
    lr_factor: Callable[[float], float] | None = None,
) -> Shrunk:
    """Shrink a configuration. Raises UserError: the settings cannot be composed, or the model is
    not known. ``config_dir``: see :func:`rlmath.config.load.compose_settings`. ``lr_factor``:
    factor of the learning rate, as a function of it; ``None``: 1."""
    given = [as_override(word, config_dir) for word in words]
    base = [path_override("runner.run_dir", folder / "run")]
    if not any(one.startswith("model.path=") for one in given):
        base += _model_if_none(given, config_dir)
    if not any(one.startswith(("data=", "data.train_paths=", "experiment=")) for one in given):
        base.append("data.train_paths=[none]")
    full = compose_settings([*base, *given, base[0]], config_dir).config
    model, note = _model_of(full)
    small = smaller_model(model)
    changes = list(_changes(full, folder, small, steps))
    factor = lr_factor(full.actor.optimizer.lr) if lr_factor else 1.0
    if factor != 1.0:
        changes += _learning_rates(full, factor)
    composed = compose_settings([*base, *given, *(override(*one) for one in changes)], config_dir)
    notes = [note, *_describe_model(model, small)]
    silent = ("runner.", "data.", "eval.", "model.path")
    for key, value in changes:
        before = value_of(full, key)
        if not key.startswith(silent) and _plain(before) != value:
            notes.append(f"{key}: {_short(_plain(before))} -> {_short(value)}")
    changed = frozenset(key for key, value in changes)
    return Shrunk(composed.config, small, tuple(notes), changed, factor)


def as_override(word: str, config_dir: str | None) -> str:
    """``quickstart`` is ``experiment=quickstart``, and ``dapo`` is ``recipe=dapo``."""
    if "=" in word:
        return word
    for group in ("experiment", "recipe"):
        own = Path(config_dir or "", group, f"{word}.yaml")
        if word in options(group) or (config_dir and own.is_file()):
            return f"{group}={word}"
    known = [*options("experiment"), *options("recipe")]
    raise UserError(f"{word}: no experiment or recipe of that name; there are {', '.join(known)}")


def _model_if_none(given: Sequence[str], config_dir: str | None) -> list[str]:
    """A recipe alone names no model."""
    if any(one.startswith(("model=", "experiment=")) for one in given):
        return []
    return ["model.path=tiny"]


def _model_of(config: Config) -> tuple[dict[str, Any], str]:
    """The config.json of the experiment's model, and where it is from."""
    path, name = config.model.path, Path(config.model.path).name
    if (Path(path) / CONFIG_FILE).is_file():
        return read_config(path), f"model: {path}"
    known = KNOWN.get(VERSIONS.get(name, (name, 0))[0])
    if known is not None:
        return dict(known), f"model: {name} by its published sizes (there is no {path})"
    if path != TINY and config.model.architecture not in (None, "Qwen2ForCausalLM"):
        raise UserError(
            f"model.path={path}: there is no such folder, and its sizes are not known by name; "
            "give the folder, or one that has its config.json alone"
        )
    if path == TINY or Path(path).is_relative_to(config.runner.run_dir):
        return tiny_config(), "model: the quickstart's"
    return tiny_config(), f"model: the quickstart's (there is no {path}; its sizes are not known)"


def smaller_model(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model of the same family that two CPU cores train in seconds. Raises
    ModelError: the family is not supported."""
    spec = model_spec(config)
    layers = min(spec.layers, LAYERS)
    small = {
        key: value
        for key, value in config.items()
        if key not in ("layer_types", "max_window_layers", "torch_dtype", "auto_map")
    }
    small |= {
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if spec.heads == spec.kv_heads else HEADS // 2,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": 2048,
        "initializer_range": HIDDEN**-0.5,
        "dtype": "float32",
    }
    if "head_dim" in config:
        small["head_dim"] = HEAD_DIM
    if spec.latent is not None:
        # vLLM's kernel on a CPU takes one width (rlmath/checks/latent.py). Of a head's rows of
        # kv_b_proj those of key and value are equally many, so that a fault can swap them.
        small |= {"q_lora_rank": 48, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        small |= dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), HEAD_DIM)
        # They follow from the others, and transformers writes them all the same.
        for key in ("head_dim", "qk_head_dim"):
            small.pop(key, None)
    if spec.linear is not None:
        # vLLM's kernels on a CPU (rlmath/checks/linear_attention.py).
        small |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64)
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "dtype": "bfloat16"}
    if spec.sliding_window:
        # Shorter than its sequences, so that it counts.
        small["sliding_window"] = 16
    if spec.experts:
        small["moe_intermediate_size"] = HIDDEN // 2
        small["num_experts_per_tok"] = min(spec.experts_per_token, 2)
        if config.get("shared_expert_intermediate_size"):
            small["shared_expert_intermediate_size"] = HIDDEN // 2
        for key in ("num_experts", "n_routed_experts", "num_local_experts"):
            if config.get(key) is not None:
                small[key] = EXPERTS
        if spec.latent is not None:
            # A token goes to one of two groups, and to both of its experts.
            small |= {"n_group": 2, "topk_group": 1}
        if config.get("first_k_dense_replace"):
            small["first_k_dense_replace"] = 1
        if config.get("mlp_only_layers"):
            small["mlp_only_layers"] = [n for n in config["mlp_only_layers"] if n < layers]
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if key in config:
            small[key] = 0
    return small


def _changes(
    config: Config, folder: Path, model: dict[str, Any], steps: int
) -> Iterator[tuple[str, Any]]:
    algorithm, actor, rollout = config.algorithm, config.actor, config.rollout
    yield "model.path", str(folder / MODEL)
    yield "data.train_paths", [str(folder / DATA)]
    yield "data.train_weights", []
    if config.data.source is not None:
        yield "data.source", None
        yield "data.source_options", {}
    yield "data.eval_paths", []
    yield "data.max_prompt_tokens", PROMPT_TOKENS
    yield "eval.benchmarks", []
    yield "eval.every", 0
    yield "rollout.max_response_tokens", RESPONSE_TOKENS
    yield "algorithm.curriculum.length_stages", []
    yield "algorithm.prompts_per_step", min(algorithm.prompts_per_step, 8)
    yield "algorithm.group_size", min(algorithm.group_size, 4)
    yield "algorithm.minibatches_per_step", min(algorithm.minibatches_per_step, 2)
    yield "actor.max_tokens_per_microbatch", min(actor.max_tokens_per_microbatch, 2048)
    yield from _layout(config, model)
    yield from _without_teacher(config)
    yield "rollout.engines", 1
    yield "rollout.tensor_parallel", 1
    yield "rollout.max_running_sequences", min(rollout.max_running_sequences, 32)
    yield "rollout.cpu_kv_cache_gib", 0.125
    if rollout.cut_after_tokens:
        share = rollout.cut_after_tokens / rollout.max_response_tokens
        yield "rollout.cut_after_tokens", max(1, round(share * RESPONSE_TOKENS))
    yield "cluster.device", Device.cpu.value
    if model_spec(model).linear is not None:
        yield "model.dtype", DType.bfloat16.value
    yield "cluster.nodes", 1
    yield "cluster.gpus_per_node", 1
    yield "cluster.ray_address", None
    yield "weights.transport", "auto"
    yield "precision.batch_invariant", False
    yield "actor.offload", "none"
    yield "actor.offload_in_backward", False
    yield "actor.lora.init_from", None
    if any(one >= LAYERS for one in actor.lora.layers or ()):
        yield "actor.lora.layers", None
    yield "actor.layers", "auto"
    # After the warm-up: at its start an update changes nothing that could be noticed.
    yield "actor.optimizer.warmup_steps", 0
    yield "actor.optimizer.decay_steps", None
    if needs_value_model(algorithm.advantage):
        yield "value.optimizer.warmup_steps", 0
    yield "value.optimizer.decay_steps", None
    yield "value.warmup_steps", 0
    if not all(item.name in REWARDS for item in config.reward.items):
        yield "reward.items", [{"name": "math"}]
    yield "runner.run_dir", str(folder / "run")
    yield "runner.steps", steps
    yield "runner.save_every", 0
    yield "runner.resume", "never"
    yield "runner.mirror", None
    yield "runner.mirror_wait_s", RunnerConfig.mirror_wait_s
    yield "runner.trackers", ["tensorboard"]
    yield "runner.metrics_port", None
    yield "runner.check_export_sequences", 0
    yield "runner.best_metric", None
    yield "runner.best_is_lowest", False


def _learning_rates(config: Config, factor: float) -> Iterator[tuple[str, Any]]:
    optimizer = config.actor.optimizer
    yield "actor.optimizer.lr", factor * optimizer.lr
    yield "actor.optimizer.min_lr", factor * optimizer.min_lr


def _layout(config: Config, model: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Two ranks at most, which share the first thing that the user's ranks share."""
    actor = config.actor
    spec = model_spec(model)
    tensor = pipeline = data = context = expert = 1
    if actor.tensor_parallel > 1:
        tensor = 2
    elif actor.pipeline_parallel > 1:
        pipeline = 2
    elif actor.expert_parallel > 1 or (actor.data_parallel or 1) > 1:
        data = 2
    elif actor.context_parallel > 1:
        context = 2
    if spec.experts and actor.expert_parallel > 1:
        expert = tensor * data
    yield "actor.tensor_parallel", tensor
    yield "actor.pipeline_parallel", pipeline
    yield "actor.pipeline_layers", None
    yield "actor.data_parallel", data
    yield "actor.context_parallel", context
    yield "actor.expert_parallel", expert
    yield "actor.sequence_parallel", tensor > 1 and actor.sequence_parallel
    if actor.recompute is Recompute.full and actor.recompute_num_layers is not None:
        yield "actor.recompute_num_layers", min(actor.recompute_num_layers, 1)


def _without_teacher(config: Config) -> Iterator[tuple[str, Any]]:
    """Remove the teacher, which a shrunk vocabulary cannot have; rewards replace it."""
    if not config.algorithm.distill_coef:
        return
    for key, setting in by_key().items():
        if key.startswith(("teacher.", "algorithm.distill_")):
            yield key, _plain(setting.default)
    if config.algorithm.advantage == "teacher":
        yield "algorithm.advantage", AdvantageSettings.name


def _describe_model(model: dict[str, Any], small: dict[str, Any]) -> list[str]:
    before, after = model_spec(model), model_spec(small)

    def sizes(spec: Any) -> str:
        experts = f", {spec.experts} experts" if spec.experts else ""
        return (
            f"{spec.layers} layers of width {spec.hidden}, {spec.heads}/{spec.kv_heads} heads"
            f"{experts}, vocabulary {spec.vocab}, {spec.num_parameters:,} weights"
        )

    lines = [f"{before.architecture}: {sizes(before)}"]
    if sizes(before) != sizes(after):
        lines.append(f"  -> {sizes(after)}")
    lines.append(
        "tokenizer: the quickstart's byte-level one; weights: random, pretrained for a few "
        f"seconds to box a digit from 0 to 3; problems: generated, at most {PROMPT_TOKENS} prompt "
        f"and {RESPONSE_TOKENS} response tokens"
    )
    return lines


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
