"""Convert models with Megatron-Bridge, in its own process and environment.

``python bridge_program.py FOLDER``: in each folder of FOLDER, ``hf`` is a Hugging Face folder,
``megatron.safetensors`` has rlmath's Megatron tensors of it, and ``names.json`` all names that
Megatron has for each of them. Beside them it writes ``bridge_loaded.safetensors`` (by rlmath's
names, what Bridge loads from ``hf``) and ``bridge_exported.safetensors`` (what it makes of
``megatron.safetensors``), or ``bridge_error.txt``.

Modules have Megatron's names and no computation: on one rank, Bridge asks of a module nothing else
but its configuration, which is the one that Bridge itself makes from config.json.
"""

import importlib.machinery
import json
import sys
import traceback
import types
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401 before the fake
from safetensors.torch import load_file, save_file
from torch import nn


def install_fake_transformer_engine():
    """A fake for ``megatron.bridge.peft``, which imports Transformer Engine for LoRA in any case.

    It computes nothing. Megatron was imported before and has found that there is none.
    """
    linear, ops = type("Linear", (nn.Module,), {}), types.SimpleNamespace(Sequential=object)
    package = types.ModuleType("transformer_engine")
    package.pytorch = types.ModuleType("transformer_engine.pytorch")
    package.pytorch.Linear, package.pytorch.ops = linear, ops
    for module in (package, package.pytorch):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module


class Named(nn.Module):
    """A module of which only the name counts."""


def module_tree(tensors, config):
    root = Named()
    root.config = config
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, Named())
            module = module._modules[part]
        module.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))
    return root


def convert(folder):
    from megatron.bridge import AutoBridge

    auto = AutoBridge.from_hf_pretrained(folder / "hf")
    bridge = auto._model_bridge
    bridge.hf_config = bridge._hf_config = auto.hf_pretrained.config
    config = auto.to_megatron_provider(load_weights=False)
    if config.kv_channels is None:  # As ``finalize`` does, which asks for kernels of a GPU.
        config.kv_channels = config.hidden_size // config.num_attention_heads
    registry = bridge.mapping_registry()
    ours = load_file(folder / "megatron.safetensors")
    chosen = {}
    for name, aliases in json.loads((folder / "names.json").read_text()).items():
        known = [one for one in reversed(aliases) if registry.megatron_to_hf_lookup(one)]
        chosen[name] = known[0] if known else name
    kept = {chosen[name]: tensor for name, tensor in ours.items()}
    nothing = {name: torch.full_like(tensor, torch.nan) for name, tensor in kept.items()}
    tree = module_tree(nothing, config)
    bridge.load_weights_hf_to_megatron(auto.hf_pretrained, [tree])
    tensors = dict(tree.named_parameters())
    loaded = {name: tensors[known].data.clone() for name, known in chosen.items()}
    save_file(loaded, folder / "bridge_loaded.safetensors")
    exported = bridge.stream_weights_megatron_to_hf(
        [module_tree(kept, config)], auto.hf_pretrained, show_progress=False
    )
    exported = {name: tensor.contiguous().clone() for name, tensor in exported}
    save_file(exported, folder / "bridge_exported.safetensors")


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    install_fake_transformer_engine()
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("Named", "replicated")
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        try:
            convert(folder)
        except Exception:
            (folder / "bridge_error.txt").write_text(traceback.format_exc())


main()
