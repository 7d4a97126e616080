"""Imported once by the server from which the ranks are forked: a process fit for Megatron."""

import gc
import warnings

from torch.utils._device import _device_constructors

from rlmath.device import CPU

# Megatron tells at length which optional packages it does without.
warnings.simplefilter("ignore")
# See rlmath.validation.processes._open_rank.
_device_constructors()
CPU.prepare_megatron_process(local_rank=0, num_threads=1)

import megatron.core.dist_checkpointing  # noqa: E402
import megatron.core.models.gpt  # noqa: E402, F401
import transformers  # noqa: E402

import rlmath.actor.policy  # noqa: E402
import rlmath.actor.value  # noqa: E402
import rlmath.checkpoint.state  # noqa: E402
import rlmath.weights.megatron  # noqa: E402, F401

# The first use loads it; the package itself is lazy.
_ = transformers.AutoConfig

# Freeze the imports: no collection of garbage in a rank looks at them, nor copies their pages.
gc.collect()
gc.freeze()
