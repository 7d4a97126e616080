"""The random streams of one rank's process, as tensors in a safetensors file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_TRACKER = "megatron."


def capture() -> dict[str, Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert version == 3 and name == "MT19937", (version, name)
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for stream, state in get_cuda_rng_tracker().get_states().items():
        states[_TRACKER + stream] = state
    return {key: state.cpu().clone() for key, state in states.items()}


def restore(states: dict[str, Tensor]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    gauss = states["python.gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy.position"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    cached = float(states["numpy.gauss"][0])
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {k.removeprefix(_TRACKER): v for k, v in states.items() if k.startswith(_TRACKER)}
    get_cuda_rng_tracker().set_states(tracked)


def save_streams(folder: Path, rank: int) -> None:
    from safetensors.torch import save_file

    save_file(capture(), str(_path(folder, rank)))


def load_streams(folder: Path, rank: int) -> None:
    """Set this process's generators to those of a rank of the checkpoint."""
    from safetensors.torch import load

    # Read rather than mapped: Megatron's tracker keeps the tensors, and with them the file.
    restore(load(_path(folder, rank).read_bytes()))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank:05d}.safetensors"
