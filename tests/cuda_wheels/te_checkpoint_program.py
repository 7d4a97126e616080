"""Checkpoints of a small model with Transformer Engine's layers, whose tensors the CPU holds.

usage: python -m tests.cuda_wheels.te_checkpoint_program train MODEL CHECKPOINT CASE
       python -m tests.cuda_wheels.te_checkpoint_program export MODEL CHECKPOINT FOLDER

CASE: JSON with ``lora`` and ``layout``.

``train`` saves and loads parameters and optimizer state, without a forward pass, which takes a GPU.
``export`` reads the checkpoint with Megatron's own layers, as a machine without a GPU does.
"""

import json
import sys
from pathlib import Path

import torch

from rlmath.actor.model import ModelSettings
from rlmath.actor.parallel import destroy, initialize
from rlmath.actor.policy import MegatronActor
from rlmath.actor.settings import ActorSettings
from rlmath.checkpoint.state import check_saveable, load_model, save_model
from rlmath.commands.selfcheck.checks.checkpoint import optimizer_tensors, state_fingerprints
from rlmath.config.optimizer import OptimizerConfig
from rlmath.device import CPU, Platform
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from rlmath.validation.convert import to_hf
from rlmath.validation.processes import ONE_RANK, free_port
from tests.cuda_wheels.forged import forge_gpus

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Worker:
    """Attributes that the fingerprints read."""

    def __init__(self, actor):
        self.actor = actor


def train(model, checkpoint, case):
    """On each rank of a layout, in its own process."""
    given = json.loads(case)
    layout = Layout(**given["layout"])
    arguments = (layout, free_port(), model, checkpoint, given["lora"])
    torch.multiprocessing.spawn(train_rank, arguments, nprocs=layout.world_size)
    ranks = [json.loads(answer_file(checkpoint, n).read_text()) for n in range(layout.world_size)]
    together = {
        key: sorted({one for rank in ranks for one in rank[key]}) for key in ("kinds", "optimizers")
    }
    for key in ("saved", "changed", "loaded"):
        together[key] = {
            f"rank {number} {name}": value
            for number, rank in enumerate(ranks)
            for name, value in rank[key].items()
        }
    return together


def train_rank(rank, layout, port, model, checkpoint, lora):
    platform = Platform("cpu", "gloo", "transformer_engine")
    platform.prepare_megatron_process(local_rank=0, num_threads=1)
    initialize(layout, platform, rank=rank, address="127.0.0.1", port=port, seed=0)
    forge_gpus()
    # Where Megatron tells Transformer Engine to put parameters.
    device = torch.device("cpu")
    torch.cuda.current_device = lambda: device
    settings = ActorSettings(
        model_path=model,
        model=ModelSettings(torch.bfloat16),
        optimizer=OptimizerConfig(),
        reference="averaged",
        lora=Lora(4, 8.0, TARGETS) if lora else None,
        temperature=1.0,
        max_tokens_per_microbatch=64,
        max_sequence_length=64,
    )
    actor = MegatronActor(settings, layout, platform)
    check_saveable(actor)
    save_model(actor, checkpoint, "before_the_first_step")
    load_model(actor, checkpoint, "before_the_first_step")
    worker = Worker(actor)
    moments = [tensor for place, tensor in optimizer_tensors(actor) if "main" not in place]
    for kind in (moments, actor.reference or []):
        for number, tensor in enumerate(kind):
            # Equal on ranks that hold the same: one of them saves it for all.
            tensor.uniform_(generator=torch.Generator().manual_seed(number))
    saved = everything(worker)
    save_model(actor, checkpoint)
    trained = [one for one in actor.module.parameters() if one.requires_grad]
    tensors = [*trained, *(tensor for _, tensor in optimizer_tensors(actor))]
    with torch.no_grad():
        for tensor in [*tensors, *(actor.reference or ())]:
            tensor.fill_(7)
    changed = everything(worker)
    load_model(actor, checkpoint)
    answer = {
        "kinds": [type(module).__name__ for module in actor.module.modules()],
        "optimizers": [type(one.optimizer).__module__ for one in parts(actor)],
        "saved": saved,
        "changed": changed,
        "loaded": everything(worker),
    }
    answer_file(checkpoint, rank).write_text(json.dumps(answer))
    destroy()


def answer_file(checkpoint, rank):
    return Path(checkpoint) / f"answer_{rank}.json"


def export(model, checkpoint, folder):
    CPU.prepare_megatron_process(local_rank=0, num_threads=2)
    initialize(ONE_RANK, CPU, rank=0, address="127.0.0.1", port=free_port(), seed=0)
    return to_hf(CPU, checkpoint, folder, model)


def everything(worker):
    reference = worker.actor.reference or []
    sums = {f"reference {n}": str(float(one.double().sum())) for n, one in enumerate(reference)}
    return sums | {name: str(value) for name, value in state_fingerprints(worker).items()}


def parts(actor):
    return getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])


if __name__ == "__main__":
    print(json.dumps({"train": train, "export": export}[sys.argv[1]](*sys.argv[2:])))
