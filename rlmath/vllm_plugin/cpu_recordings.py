"""Decode passes of a small model on CPU without the model's Python: recorded once, then replayed.

A pass of ``n`` sequences that each add a token calls the same operators on the same memory as the
one before; only numbers in that memory differ. For a model of half a million parameters vLLM's
Python around the operators takes as long as half of them. So the operators of a pass are recorded
for each ``n``, with the memory that they work on, and called one after another from then on: what
CUDA graphs are on a GPU.

A recording is made only of operators that are known to depend on nothing but their arguments, and
replayed only while all memory that it refers to is where it was. Whatever else there is goes
vLLM's way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rlmath.vllm_plugin.cpu_matrices import address_of

logger = logging.getLogger(__name__)

# An operator, its arguments and its keyword arguments.
Call = tuple[Any, list[Any], dict[str, Any]]

MIB = 2**20
# A pass that writes more than this spends its time in kernels.
MAX_PASS_BYTES = 8 * MIB
# Of all recordings of an engine together; the oldest goes first.
MAX_BYTES = 128 * MIB
# More recordings than replays, after which there are no more.
MAX_IN_VAIN = 64

aten = torch.ops.aten
# These give memory or another view of it, which a replay has already.
_VIEWS = {
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.expand.default,
    aten.new_empty.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
}
# These give a new tensor; a replay writes it where the recorded one was.
_INTO: dict[Any, Any] = {
    aten.add.Tensor: aten.add.out,
    aten.cat.default: aten.cat.out,
    aten.embedding.default: aten.embedding.out,
    aten.index_select.default: aten.index_select.out,
    aten.mean.dim: aten.mean.out,
    aten.mul.Tensor: aten.mul.out,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Scalar_out,
    aten.rsqrt.default: aten.rsqrt.out,
    aten.silu.default: aten.silu.out,
}
# These give a copy of their first argument.
_COPIES = {aten._to_copy.default, aten.clone.default}
# These write into their arguments.
_IN_PLACE = {aten.add_.Tensor, aten.copy_.default, aten.mul_.Tensor}
# As above, of vLLM; by name, as a build may lack some.
_OF_VLLM = (
    "_C::cpu_attention_with_kv_cache",
    "_C::cpu_attn_reshape_and_cache",
    "_C::fused_add_rms_norm",
    "_C::onednn_mm",
    "_C::rms_norm",
    "_C::rotary_embedding",
    "_C::silu_and_mul",
)

_vllm_forward = CPUModelRunner._model_forward


class NotRecordable(Exception):
    """A pass does something that a replay would not repeat."""


class TooLarge(NotRecordable):
    """A pass writes more than ``MAX_PASS_BYTES``."""


@dataclass(frozen=True)
class Constant:
    """Memory of the engine that a recording refers to.

    Attributes:
        find: Gives the tensor that the engine has now.
        tensor: What it had; kept, so that its address is not given to another.
        address: Of its data.
        is_written: By passes: a KV cache.
    """

    find: Callable[[], Tensor | None]
    tensor: Tensor
    address: int
    is_written: bool = False

    def is_there(self) -> bool:
        """Whether the engine still has it there."""
        now = self.find()
        return now is not None and now.data_ptr() == self.address


@dataclass(frozen=True)
class Recording:
    """The operators of a pass.

    Attributes:
        calls: Operator, arguments and keyword arguments.
        plan_places: Lists of arguments, and which of them is the plan of the attention kernel.
        inputs: See :class:`_Pass`; kept, as the constants are.
        constants: What else of the engine it reads or writes.
        own: Memory that passes write and nothing else reads.
        output: Of the pass.
    """

    calls: list[Call]
    plan_places: list[tuple[list[Any], int]]
    inputs: list[Tensor]
    constants: list[Constant]
    own: list[Tensor]
    output: Tensor

    @property
    def num_bytes(self) -> int:
        """Size of ``own``."""
        return sum(one.nbytes for one in self.own)

    def fits(self, inputs: list[Tensor]) -> bool:
        """Whether a pass with these inputs works on the recorded memory."""
        for ours, theirs in zip(self.inputs, inputs, strict=True):
            if ours is not theirs and (
                ours.data_ptr() != theirs.data_ptr()
                or ours.shape != theirs.shape
                or ours.stride() != theirs.stride()
            ):
                return False
        return all(one.is_there() for one in self.constants)

    def replay(self, plan: Tensor) -> Tensor:
        """Run the pass.

        Args:
            plan: Of the attention kernel, for the sequences' present lengths.

        Returns:
            Its output, valid until the next pass.
        """
        for arguments, place in self.plan_places:
            arguments[place] = plan
        for operator, arguments, named in self.calls:
            operator(*arguments, **named)
        return self.output

    def spoil(self) -> None:
        """Overwrite what the last pass left in its memory."""
        for tensor in self.own:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


@dataclass
class Recordings:
    """Those of an engine, by the number of sequences.

    Attributes:
        hooks: Of the model's modules. With any of them the model's own code has to run.
        made: The recordings.
        is_proven: A replay has given what the model gave.
        reason: Why there are none; empty while there may be.
        too_large: Passes of this many sequences or more write too much.
        num_made: How many were made, those that are gone included.
        num_replays: Passes that were replayed.
    """

    hooks: list[Mapping[int, Any]]
    made: dict[int, Recording] = field(default_factory=dict)
    is_proven: bool = False
    reason: str = ""
    too_large: int | None = None
    num_made: int = 0
    num_replays: int = 0

    def allow(self, n: int) -> bool:
        """Whether a pass of ``n`` sequences may be recorded."""
        small = self.too_large is None or n < self.too_large
        return not self.reason and small and not any(self.hooks)

    def keep(self, n: int, recording: Recording) -> None:
        """Keep one, and drop the oldest if they are too many."""
        self.made[n] = recording
        self.num_made += 1
        while len(self.made) > 1 and sum(r.num_bytes for r in self.made.values()) > MAX_BYTES:
            del self.made[next(iter(self.made))]

    def give_up(self, reason: str) -> None:
        """Record nothing any more."""
        self.reason = reason
        self.made.clear()


@dataclass(frozen=True)
class _Pass:
    """What a pass reads besides the model.

    Attributes:
        inputs: Token ids, positions, slots of the KV cache, lengths and their sums, block table.
        plan: Of the attention kernel. Another tensor for each pass.
    """

    inputs: list[Tensor]
    plan: Tensor


class _Recorder(TorchDispatchMode):
    """Records the operators that are called while it is entered, and lets no others through.

    Args:
        of: The pass.
        constants: By the address of their storage.
    """

    def __init__(self, of: _Pass, constants: dict[int, Constant]) -> None:
        super().__init__()
        self._plan = of.plan
        self._inputs = {_storage(one) for one in of.inputs}
        self._constants = constants
        self._num_bytes = 0
        self.own: dict[int, Tensor] = {}
        self.calls: list[Call] = []
        self.plan_places: list[tuple[list[Any], int]] = []
        self.used: dict[int, Constant] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "aten":
            # In inference mode operators that consist of others arrive whole.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in _VIEWS:
            for tensor in _tensors([result]):
                self._own(tensor)
        elif func in _COPIES:
            self._own(result)
            self._add(aten.copy_.default, [result, args[0]], {})
        elif func in _INTO:
            self._own(result)
            self._add(_INTO[func], list(args), {**kwargs, "out": result})
        else:
            self._add(func, list(args), kwargs)
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call before it changes anything."""
        is_known = func in _VIEWS or func in _COPIES or func in _INTO or func in _IN_PLACE
        if not is_known and func.name() not in _OF_VLLM:
            raise NotRecordable(f"the model calls {func.name()}")
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False)]
        given += [(one, kwargs[one.name]) for one in schema if one.name in kwargs]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors([value]):
                self._account(tensor, func, writes)

    def _account(self, tensor: Tensor, func: Any, writes: bool) -> None:
        storage = _storage(tensor)
        if storage in self.own or not tensor.numel():
            return
        constant = self._constants.get(storage)
        if constant is not None:
            self.used[storage] = constant
        elif tensor is not self._plan and storage not in self._inputs:
            raise NotRecordable(f"{func.name()} takes a tensor that may be another one next time")
        if writes and (constant is None or not constant.is_written):
            raise NotRecordable(f"{func.name()} changes what the next pass reads")

    def _own(self, tensor: Tensor) -> None:
        """What a view or an operator gave is own memory, unless it is known already."""
        storage = _storage(tensor)
        known = storage in self.own or storage in self._inputs or storage in self._constants
        if known or not tensor.numel():
            return
        self.own[storage] = tensor
        self._num_bytes += tensor.nbytes
        if self._num_bytes > MAX_PASS_BYTES:
            raise TooLarge(f"it writes more than {MAX_PASS_BYTES // MIB} MiB")

    def _add(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        if any(value is self._plan for value in kwargs.values()):
            raise NotRecordable(f"{func.name()} takes the attention kernel's plan by name")
        self.plan_places += [(args, i) for i, value in enumerate(args) if value is self._plan]
        self.calls.append((func, args, kwargs))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _constants(model: torch.nn.Module) -> dict[int, Constant]:
    """Parameters, buffers, addresses of packed matrices and KV caches, by the address of their
    storage."""
    found: dict[int, Constant] = {}

    def add(find: Callable[[], Any], is_written: bool = False) -> None:
        tensor = find()
        if isinstance(tensor, Tensor) and tensor.numel():
            found[_storage(tensor)] = Constant(find, tensor, tensor.data_ptr(), is_written)

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name in table:
                add(partial(table.get, name))
        add(partial(address_of, module))
        if isinstance(module, Attention):
            add(partial(getattr, module, "kv_cache", None), is_written=True)
    return found


def next_passes(runner: Any, input_ids: Tensor, positions: Tensor) -> Callable[[], Tensor] | None:
    """Passes after one that was just made in the same way, on the same memory.

    Call it in the forward context of that pass. Until something else happens in the engine, each
    call of the result is a pass on what the memory then has.

    Returns:
        ``None``: they have to be prepared and run one by one.
    """
    recordings, n = recordings_of(runner), len(input_ids)
    recording = recordings.made.get(n)
    if recording is None or not recordings.is_proven or not recordings.allow(n):
        return None
    of = _as_pass(input_ids, positions)
    if of is None or not recording.fits(of.inputs):
        return None
    _, _, slots, seq_lens, query_start_loc, block_table = of.inputs
    builder = runner.attn_groups[0][0].get_metadata_builder()
    common = CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens,
        num_reqs=n,
        num_actual_tokens=n,
        max_query_len=1,
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=block_table,
        slot_mapping=slots,
    )

    def pass_again() -> Tensor:
        recordings.num_replays += 1
        return recording.replay(builder.build(0, common).scheduler_metadata)

    return pass_again


def _as_pass(input_ids: Tensor, positions: Tensor) -> _Pass | None:
    """The pass that vLLM has prepared; ``None``: it is not one token of each sequence under plain
    causal attention."""
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    of_layers, slots_of_layers = context.attn_metadata, context.slot_mapping
    if not isinstance(of_layers, dict) or not isinstance(slots_of_layers, dict):
        return None
    metadata: Any = next(iter(of_layers.values()), None)
    slots = next(iter(slots_of_layers.values()), None)
    if (
        type(metadata) is not CPUAttentionMetadata
        or not isinstance(slots, Tensor)
        or metadata.scheduler_metadata is None
        or metadata.max_query_len != 1
        or metadata.causal is not True
        or metadata.dynamic_causal is not None
        or metadata.encoder_cache is not None
        or not metadata.num_actual_tokens == len(input_ids) == len(metadata.seq_lens)
        or any(one is not metadata for one in of_layers.values())
        or any(one is not slots for one in slots_of_layers.values())
    ):
        return None
    inputs = [
        input_ids,
        positions,
        slots,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.block_table,
    ]
    return _Pass(inputs, metadata.scheduler_metadata)


@contextmanager
def _direct_attention(model: torch.nn.Module) -> Iterator[None]:
    """Attention layers call their kernels without the operator that hides them from a recorder."""
    layers = [one for one in model.modules() if isinstance(one, Attention)]
    before = [one.use_direct_call for one in layers]
    for layer in layers:
        layer.use_direct_call = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.use_direct_call = value


def _record(runner: Any, of: _Pass) -> Recording:
    """Run a pass, and record it.

    Raises:
        NotRecordable: After part of the pass. Run again, it writes the same to the same places.
    """
    model = runner.model
    if runner.lora_config is not None:
        raise NotRecordable("which adapter a pass has is not in its tensors")
    if runner.cache_config.cache_dtype != "auto":
        raise NotRecordable("scales of the KV cache are not in its tensors")
    recorder = _Recorder(of, _constants(model))
    with _direct_attention(model), recorder:
        output = _vllm_forward(runner, of.inputs[0], of.inputs[1])
    if not isinstance(output, Tensor):
        raise NotRecordable("the model returns more than hidden states")
    return Recording(
        recorder.calls,
        recorder.plan_places,
        of.inputs,
        list(recorder.used.values()),
        list(recorder.own.values()),
        output,
    )


def _replayed(recordings: Recordings, runner: Any, recording: Recording, of: _Pass) -> Tensor:
    """The output of a pass. The first replay of an engine is compared with the model."""
    if not recordings.is_proven:
        recording.spoil()
        ours = recording.replay(of.plan).clone()
        theirs: Tensor = _vllm_forward(runner, of.inputs[0], of.inputs[1])
        if not torch.equal(ours, theirs):
            recordings.give_up("a replay gave other values than the model")
            logger.warning(
                "CPU engine: a recorded pass gave other values than the model, so passes are not "
                "recorded: generation is slower. Its results are the model's."
            )
            return theirs
        recordings.is_proven = True
    recordings.num_replays += 1
    return recording.replay(of.plan)


def model_forward(
    self: Any,
    input_ids: Tensor | None = None,
    positions: Tensor | None = None,
    intermediate_tensors: Any = None,
    inputs_embeds: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Run the model, or the recording of such a pass; see vLLM's method."""
    recordings, of = recordings_of(self), None
    has_more = intermediate_tensors is not None or inputs_embeds is not None or bool(model_kwargs)
    if input_ids is not None and positions is not None and not has_more:
        of = _as_pass(input_ids, positions) if recordings.allow(len(input_ids)) else None
    if input_ids is None or of is None:
        return _vllm_forward(
            self, input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
        )
    n = len(input_ids)
    recording = recordings.made.get(n)
    if recording is not None and recording.fits(of.inputs):
        return _replayed(recordings, self, recording, of)
    if recordings.num_made > MAX_IN_VAIN + recordings.num_replays:
        recordings.give_up("the memory that passes work on moves from pass to pass")
        return _vllm_forward(self, input_ids, positions)
    recordings.made.pop(n, None)
    try:
        recording = _record(self, of)
    except TooLarge:
        recordings.too_large = n
        return _vllm_forward(self, input_ids, positions)
    except NotRecordable as reason:
        recordings.give_up(str(reason))
        return _vllm_forward(self, input_ids, positions)
    except Exception as error:
        # If it is the model's, the model raises it again.
        recordings.give_up(f"{type(error).__name__}: {error}")
        logger.warning("CPU engine: passes cannot be recorded: %s", recordings.reason)
        return _vllm_forward(self, input_ids, positions)
    recordings.keep(n, recording)
    return recording.output


def _hooks(model: torch.nn.Module) -> list[Mapping[int, Any]]:
    found: list[Mapping[int, Any]] = [_global_forward_hooks, _global_forward_pre_hooks]
    for module in model.modules():
        found += [module._forward_hooks, module._forward_pre_hooks]
    return found


def recordings_of(runner: Any) -> Recordings:
    """Those of a model runner."""
    if not hasattr(runner, "rlmath_recordings"):
        runner.rlmath_recordings = Recordings(_hooks(runner.model))
    found: Recordings = runner.rlmath_recordings
    return found


def install() -> None:
    """Let this process's CPU workers record and replay passes."""
    CPUModelRunner._model_forward = model_forward  # type: ignore[method-assign]
