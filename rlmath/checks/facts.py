"""What the checks need to know of the model's folder, the data files and the machine.

Reads a few small files and nothing else: no torch, no transformers, no weights.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config.schema import Device
from rlmath.errors import ConfigError
from rlmath.model.folder import TINY
from rlmath.utils import transformer_engine as te_install

ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
)
MIXTURES = ("Qwen3MoeForCausalLM",)
# Kinds of rotary embedding that Megatron's can express: those that leave attention's scale alone.
ROPE_TYPES = ("default", "linear", "llama3")
# What ``config.json`` may say of the weights' type.
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Rows that are looked at in each data file; the whole file is read when the run starts.
PEEKED_ROWS = 4


@dataclass(frozen=True)
class ModelFacts:
    """Sizes from a Hugging Face ``config.json``.

    Attributes:
        num_experts: Experts of a mixture layer; 0 for a dense model.
        expert_size: Feed-forward width of one expert.
        mixture_layers: Layers that are mixtures.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_type: str = "default"
    num_experts: int = 0
    expert_size: int = 0
    mixture_layers: int = 0

    @property
    def num_expert_parameters(self) -> int:
        """Weights of all experts, which expert-parallel ranks share between them."""
        one = 3 * self.hidden_size * self.expert_size
        return self.mixture_layers * self.num_experts * one

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices and embeddings; norms and biases are left out."""
        queries = self.num_heads * self.head_dim
        keys_and_values = 2 * self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + keys_and_values)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        dense = (self.num_layers - self.mixture_layers) * feed_forward
        routers = self.mixture_layers * self.num_experts * self.hidden_size
        experts = routers + self.num_expert_parameters
        return self.num_layers * attention + dense + experts + embeddings


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        gpus: NVIDIA GPUs that this process may use.
        torch_build: torch's version, such as ``2.13.0+cpu``; ``None`` when it is not installed.
        memory_bytes: Memory, the container's limit where there is one.
        disk_bytes: Free space where runs go; ``None``: asked of the run folder's disk.
        transformer_engine: What Transformer Engine lacks; ``None``: nothing that can be seen
            without importing it. Only looked for where there are GPUs.
        flash_attention: Whether flash-attn is installed, which batch invariance needs.
    """

    gpus: int
    torch_build: str | None
    memory_bytes: int
    disk_bytes: int | None = None
    transformer_engine: str | None = None
    flash_attention: bool = True

    @property
    def has_cuda(self) -> bool:
        """Whether torch can use a GPU here."""
        return self.gpus > 0 and self.torch_build is not None and "+cpu" not in self.torch_build

    def device(self, wanted: Device) -> Device:
        """What ``cluster.device`` stands for on this machine."""
        if wanted is Device.auto:
            return Device.cuda if self.has_cuda else Device.cpu
        return wanted

    def free_bytes(self, path: str | Path) -> int:
        """Free space on the disk on which ``path`` is, or will be."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        return shutil.disk_usage(existing_parent(path)).free

    @classmethod
    def here(cls) -> Machine:
        """Look at the machine, without starting CUDA."""
        try:
            torch_build = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch_build = None
        gpus = _visible_gpus()
        return cls(
            gpus,
            torch_build,
            _memory_bytes(),
            transformer_engine=te_install.missing_part() if gpus else None,
            flash_attention=te_install.has_flash_attention(),
        )


def read_model(path: str) -> ModelFacts:
    """The sizes of the model in a Hugging Face folder.

    Raises:
        ConfigError: ``config.json`` is missing, cannot be read, or lacks a size.
    """
    if path == TINY:
        return _tiny_model()
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path={path}: there is no config.json in it")
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        # The first since transformers 5, the second before.
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        architecture = (raw.get("architectures") or ["(none)"])[0]
        # Again two names; transformers takes it for an attribute of torch.
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype is {dtype!r} and none of {', '.join(WEIGHT_DTYPES)}")
        return ModelFacts(
            architecture=architecture,
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope_type=str(rope.get("rope_type") or rope.get("type") or "default"),
            **(_experts(raw) if architecture in MIXTURES else {}),
        )
    except KeyError as error:
        raise ConfigError(
            f"model.path={path}: config.json has no {error.args[0]}; "
            f"the models that work are {', '.join(ARCHITECTURES)}"
        ) from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"model.path={path}: config.json cannot be read: {error}") from error


def _experts(raw: dict[str, Any]) -> dict[str, int]:
    """What a mixture has besides; published files say num_experts, transformers 5 otherwise."""
    key = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    step, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or ())
    layers = range(int(raw["num_hidden_layers"]))
    return {
        "num_experts": int(raw[key]),
        "expert_size": int(raw["moe_intermediate_size"]),
        "mixture_layers": sum(n not in dense and (n + 1) % step == 0 for n in layers),
    }


def missing_model_files(path: str) -> list[str]:
    """Files that a model's folder should have and has not."""
    if path == TINY:
        return []
    folder = Path(path)
    missing = []
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZER_FILES)})")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            return [*missing, f"a {index.name} that can be read"]
        missing += sorted(name for name in shards if not (folder / name).is_file())
    elif not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    return missing


def peek_rows(path: str | Path) -> list[tuple[str, Any]]:
    """The first rows of a data file, each with where it stands (``file.jsonl:3``).

    Args:
        path: A ``.jsonl``, ``.json`` or ``.parquet`` file.

    Raises:
        ConfigError: The file is missing, empty, of another kind, or cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        kind = "it is a folder; give the files in it" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {kind}")
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: data files end in {', '.join(readers)}")
    try:
        rows = readers[path.suffix](path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: no rows in it")
    return rows


def existing_parent(path: str | Path) -> Path:
    """``path`` itself, or the nearest folder above it that is there."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def _tiny_model() -> ModelFacts:
    from rlmath.model.tiny import make_tiny_model
    from rlmath.model.tiny_tokenizer import SPECIAL_TOKENS

    sizes = {
        name: parameter.default
        for name, parameter in inspect.signature(make_tiny_model).parameters.items()
    }
    return ModelFacts(
        architecture="Qwen2ForCausalLM",
        num_layers=sizes["num_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_dim=sizes["hidden_size"] // sizes["num_heads"],
        vocab_size=256 + len(SPECIAL_TOKENS),
        max_position_embeddings=sizes["max_position_embeddings"],
        tie_word_embeddings=sizes["tie_word_embeddings"],
    )


def _jsonl_rows(path: Path) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except ValueError as error:
                rows.append((f"{path}:{number}", error))
            if len(rows) == PEEKED_ROWS:
                break
    return rows


def _json_rows(path: Path) -> list[tuple[str, Any]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):  # An object with the list of rows in it.
        lists = [value for value in data.values() if isinstance(value, list)]
        data = lists[0] if len(lists) == 1 else data
    if not isinstance(data, list):
        raise ValueError("a .json data file is a list of rows, or an object with one list in it")
    return [(f"{path}, row {i + 1}", row) for i, row in enumerate(data[:PEEKED_ROWS])]


def _parquet_rows(path: Path) -> list[tuple[str, Any]]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        batch = next(file.iter_batches(batch_size=PEEKED_ROWS), None)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(str(error)) from error
    rows = [] if batch is None else batch.to_pylist()
    return [(f"{path}, row {i + 1}", row) for i, row in enumerate(rows)]


def _visible_gpus() -> int:
    cards = Path("/proc/driver/nvidia/gpus")
    # Containers often hide /proc but give the device files.
    there = len(list(cards.iterdir())) if cards.is_dir() else 0
    there = there or len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    # CUDA stops at the first name that is not valid, such as -1.
    names = [name.strip() for name in visible.split(",")]
    valid = 0
    for name in names:
        if not name or name.startswith("-"):
            break
        valid += 1
    return min(there, valid)


def _memory_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            memory = min(memory, int(text))
    return memory
