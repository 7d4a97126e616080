"""The shell commands of README and docs, and a folder in which they find what they name."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from rlmath.model.tiny_tokenizer import fast_tokenizer
from rlmath.weights.pieces import file_shapes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = re.compile(
    r"(\$ |[A-Z_]+=\S+ )*(rlmath|bash|python|hf|sbatch|kubectl|docker|pip|source|"
    r"\.venv/bin/\w+|ray_utils/\w+\.sh|launchers/\w+\.sh)(?= |$)"
)


# About the model that the quickstart makes.
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Command:
    """A command of a page, joined over backslashes, without its comment."""

    page: str
    text: str

    @property
    def words(self):
        """As a shell splits it, without variables before it and without ``...``; a value that is
        left open (``model.path=...``) is the 1.5 B model."""
        words = shlex.split(self.text)
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        return [_fill(word) for word in words if word != "..."]

    def __str__(self):
        return f"{self.page}: {self.text[:70]}"


def _fill(word):
    return word.replace("=...", "=models/DeepSeek-R1-Distill-Qwen-1.5B")


def documented_commands():
    """Commands in code blocks, and those in the text that have arguments."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        joined = re.sub(r"\\\n\s*", "", text)
        lines = re.findall(r"^    +(\S.*)$", joined, re.MULTILINE)
        spans = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text)
        spans = [" ".join(span.split()) for span in spans]
        spans = [span for span in spans if not re.fullmatch(r"rlmath( [a-z]+)+|\S+", span)]
        for line in lines + spans:
            command = re.sub(r"\s+#.*$", "", line).removeprefix("$ ").rstrip()
            if PROGRAM.match(command):
                found[Command(page.name, command)] = None
    return list(found)


def write_model(folder, config):
    """Files that the checks look at: sizes, names of other files, weights that are shapes alone."""
    folder.mkdir(parents=True)
    # As transformers names it, which an export is read by.
    name = config["architectures"][0].removesuffix("ForCausalLM")
    kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    fast_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    entry = {"dtype": "F32", "data_offsets": [0, 0]}
    shapes = file_shapes(model_spec(config))
    header = json.dumps({name: {**entry, "shape": shape} for name, shape in shapes.items()})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_clone(folder):
    """A folder with the clone's files and, beside them, models, data sets and runs of the docs."""
    clone = folder / "clone"
    clone.mkdir()
    for name in (
        "conf",
        "launchers",
        "ray_utils",
        "rlmath",
        "toolkits",
        "benchmarks",
        "tests",
        "examples",
    ):
        (clone / name).symlink_to(ROOT / name)
    for name, config in KNOWN.items():
        write_model(clone / "models" / name, config)
    for name, data in (("quickstart", "data"), ("quickstart_tools", "products")):
        run = clone / "runs" / name
        for model in ("model", "sft", "hf"):
            write_model(run / model, TINY)
        for rows in ("train", "eval"):
            row = {"prompt": "1 + 1?", "solutions": ["\\boxed{2}"]}
            write_rows(run / data / f"{rows}.jsonl", row)
    write_model(clone / "runs" / "day5" / "hf", KNOWN["Qwen2.5-32B"])
    trained = clone / "runs" / "qwen2.5-1.5b-grpo-megatron" / "hf"
    write_model(trained, KNOWN["DeepSeek-R1-Distill-Qwen-1.5B"])
    problem = "How many whole numbers between one and one hundred are multiples of seven or nine?"
    boba = {"prompt": f"<user>{problem}<assistant>", "solutions": ["\\boxed{24}"]}
    other = {"prompt": "Add 19 and 23.", "solutions": ["42"]}
    for name in ("boba", "dapo", "dapo_clean", "gsm8k"):
        write_rows(clone / "datasets" / f"{name}.jsonl", boba, other)
    row = {"problem": problem, "question": problem, "answer": "24", "final_answer": ["24"]}
    for name in ("aime24", "aime25", "amc23", "math500", "gpqa_diamond"):
        write_rows(clone / "datasets" / "benchmarks" / f"{name}.jsonl", row)
        write_rows(folder / "shared" / "data" / f"{name}.jsonl", row)
    (clone / "my_rewards.py").write_text(
        "def short(completions, **columns):\n    return [-len(c) / 1000 for c in completions]\n"
    )
    for name in ("train", "gsm8k_train"):
        write_rows(clone / f"{name}.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    return clone
