"""A trainer's end that sends adapters, and the model that they are merged into."""

import dataclasses
from typing import Any

import ray
import sender as sender_module
import torch
from reference import Reference, send
from trainers import BUCKET_SIZE_MIB, plan_for

from rlmath.model.lora import adapter_shapes, lora_a, lora_b
from rlmath.model.spec import read_model_spec
from rlmath.weights.fingerprint import fingerprints


def adapters(folder, lora, seed):
    """As they are sent: ``B`` has ``alpha / rank`` in it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.15 * torch.randn(shape, generator=generator)
        for name, shape in adapter_shapes(read_model_spec(folder), lora).items()
    }


def merge(base, sent):
    whole = dict(base)
    for name, weight in base.items():
        if lora_a(name) in sent:
            product = sent[lora_b(name)].double() @ sent[lora_a(name)].double()
            whole[name] = (weight.double() + product).float()
    return whole


class Trainer:
    """A sender of adapters with a model that they are merged into."""

    def __init__(self, pool, folder, lora):
        self.pool, self.folder, self.lora = pool, folder, lora
        self.reference = Reference(folder)
        self.base = {name: one.clone() for name, one in self.reference.tensors().items()}
        actor = ray.remote(sender_module.Sender).options(num_cpus=0)
        plan = dataclasses.replace(plan_for(pool, pool.engines), adapters=True)
        # Some of a layer's adapters in one bucket and some in the next.
        self.sent = adapters(folder, lora, 0)
        self.sender: Any = actor.remote(plan, self.sent, BUCKET_SIZE_MIB / 8, 0, 1, "")

    def sync(self, seed):
        """Send other adapters; the fingerprints of what engines should hold then."""
        self.sent = adapters(self.folder, self.lora, seed)
        ray.get(self.sender.set_tensors.remote(self.sent))
        send(self.sender, self.pool)
        self.reference.load(merge(self.base, self.sent))
        return fingerprints((self.base | self.sent).items())
