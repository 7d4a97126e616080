"""Four gloo ranks that live for a whole test module, and what the tests of weights ask of them.

Starting Megatron takes seconds, so each rank waits for commands and takes on one layout after the
other. ``Ranks`` is the side of the test, ``_serve`` the side of a rank; every function from
``round_trip`` on runs on all ranks at once.
"""

import gc
import os
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.rank_pool import rank_context
from tests.support.batches import batch_of_lengths

WORLD_SIZE = 4


@dataclass(frozen=True)
class Case:
    """One layout: tensor, pipeline, virtual stages per rank, expert and expert-tensor parallel.

    ``stages`` are the layers of each stage.
    """

    tp: int = 1
    pp: int = 1
    vp: int | None = None
    ep: int = 1
    etp: int | None = None
    stages: tuple[int, ...] = ()

    def expert_tp(self):
        """As the actor has it, unless given."""
        return 1 if self.etp is None and self.ep > 1 else self.etp

    def is_plain(self):
        """Whether the actor has no such layout."""
        cut_alone = self.etp is not None and self.ep == 1
        return self.vp is not None or cut_alone

    def name(self):
        """Differences from a single rank, as in ``tp2-pp2``; for the names of tests."""
        given = {k: v for k, v in vars(self).items() if v not in (None, 1, ())}
        return "-".join(f"{k}{v}" for k, v in given.items()) or "single"


class Ranks:
    """Four rank processes; ``call`` runs a function of this module on all of them."""

    def __init__(self, port):
        context = rank_context()
        self._pipes: list[Connection] = []
        self._processes = []
        self._broken = ""
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function, *args, timeout_s=120.0):
        """Results of all ranks; raises ``AssertionError`` with the first rank's traceback."""
        assert not self._broken, f"the ranks were left out of step by {self._broken}"
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        errors = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(1.0 if errors else timeout_s):
                errors.append(f"rank {rank} gave no answer to {function}")
                continue
            ok, value = pipe.recv()
            (results if ok else errors).append(value)
        if errors:
            # Some ranks may still wait in a collective that the others have left.
            self._broken = f"{function}{args}"
            raise AssertionError("\n".join(errors))
        return results

    def close(self):
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(0.2 if self._broken else 5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank, port, pipe):
    from rlmath.device import CPU

    CPU.prepare_megatron_process(local_rank=rank, num_threads=1)
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=rank == 0)
    _layouts.append(_Layouts(rank, store))
    while (command := pipe.recv()) is not None:
        function, args = command
        try:
            pipe.send((True, globals()[function](*args)))
        except Exception:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    _layouts[0].leave()


class _Layouts:
    """Megatron's groups in one layout at a time.

    Every gloo group has its own threads, and Megatron makes dozens of groups, so those of the
    layout before have to go: all of torch's groups are left and made again.
    """

    def __init__(self, rank, store):
        self._rank = rank
        self._store = store
        self._case: Case | None = None
        self._changes = 0

    def enter(self, case):
        from megatron.core import parallel_state, tensor_parallel

        if case == self._case:
            return
        self.leave()
        self._changes += 1
        store = dist.PrefixStore(f"layout{self._changes}", self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=WORLD_SIZE)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.expert_tp(),
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self._case = case

    def leave(self):
        from megatron.core import parallel_state

        if self._case is not None:
            parallel_state.destroy_model_parallel()
            # Models refer to their groups.
            gc.collect()
            dist.destroy_process_group()
            self._case = None


# This rank's only one, from its start on.
_layouts = []


def num_threads():
    """Threads of this rank, which must not grow from layout to layout."""
    return len(os.listdir("/proc/self/task"))


def _build(folder, case):
    """This rank's model chunks in a layout, filled with numbers that no file has."""
    _layouts[0].enter(case)
    chunks = _chunks(folder, case)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(-77.0)
    return chunks


def _chunks(folder, case):
    """The actor's own model where it covers the case, else Megatron's with plain local layers."""
    from rlmath.model.spec import read_model_spec

    spec = read_model_spec(folder)
    if not case.is_plain():
        from rlmath.actor.model import ModelSettings, build_model
        from rlmath.device import CPU
        from rlmath.model.parallel import Layout

        copies = WORLD_SIZE // case.tp // case.pp
        layout = Layout(
            case.tp, case.pp, copies, expert_parallel=case.ep, pipeline_layers=case.stages
        )
        # Experts together with tensor parallel demand it.
        sequence_parallel = bool(spec.experts) and case.tp > 1
        settings = ModelSettings(torch.float32, sequence_parallel)
        return [build_model(spec, layout, CPU, settings, 128)]
    return [_plain_chunk(spec, case, stage) for stage in range(case.vp or 1)]


def _plain_chunk(spec, case, vp_stage):
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rlmath.model.families import QkNorm
    from rlmath.model.spec import padded_vocab_size

    moe = {}
    if spec.experts:
        moe = {
            "num_moe_experts": spec.experts,
            "moe_ffn_hidden_size": spec.moe_ffn,
            "moe_router_topk": spec.experts_per_token,
            "moe_layer_freq": [int(spec.is_moe_layer(n)) for n in range(spec.layers)],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.etp,
        }
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm is QkNorm.per_head,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        # Experts together with tensor parallel demand it.
        sequence_parallel=bool(spec.experts) and case.tp > 1,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **moe,
    )
    if spec.experts:
        layers = _expert_spec(specs, config, vp_stage if case.vp is not None else None)
    else:
        layers = specs.get_gpt_layer_local_spec(
            qk_layernorm=spec.qk_norm is QkNorm.per_head, normalization="RMSNorm"
        )
    stage = {} if case.vp is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=padded_vocab_size(spec.vocab, case.tp),
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_base=int(spec.rope.theta),
        vp_stage=vp_stage if case.vp is not None else None,
    )
    return model


def _expert_spec(specs, config, vp_stage):
    """Megatron's own layers of an MoE, with norms that allow sequence parallel."""
    from rlmath.actor.attention import ParallelRMSNorm
    from rlmath.actor.experts import decoder_spec

    spec = decoder_spec(specs, config, on_te=False, vp_stage=vp_stage)
    spec.layer_norm = ParallelRMSNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = ParallelRMSNorm
        layer.submodules.pre_mlp_layernorm = ParallelRMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ParallelRMSNorm
    return spec


def _load(folder, case):
    """Chunks of a layout with a folder's weights, the model's spec and this rank's place."""
    from rlmath.model.rank_layout import ParallelRank
    from rlmath.model.spec import read_model_spec
    from rlmath.weights.megatron import load_from_hf

    chunks, spec = _build(folder, case), read_model_spec(folder)
    parallel = ParallelRank.from_megatron()
    load_from_hf(chunks, folder, spec, parallel)
    return chunks, spec, parallel


def round_trip(folder, case, bucket_size_mib):
    """Load a folder and gather it again in all three ways; what each rank saw.

    Returns:
        ``to_rank_0``, ``to_all`` and ``written`` (through a buffer shared by the ranks): tensors by
        name; ``fingerprints`` from the shards; ``sends``: which global rank gives which run;
        ``buckets``: their number; ``padding``: the embedding's rows beyond the vocabulary.
    """
    from rlmath.weights.gather import BucketGatherer

    chunks, spec, parallel = _load(folder, case)
    gatherer = BucketGatherer(chunks, spec, parallel, bucket_size_mib)
    to_rank_0 = dict(pair for bucket in gatherer.gather(0) for pair in bucket)
    assert not gatherer.find_drift()
    to_all = dict(pair for bucket in gatherer.gather(None) for pair in bucket)
    buckets = gatherer.gather(None, keeps=dist.get_rank() == 0)
    kept = dict(pair for bucket in buckets for pair in bucket)
    assert kept.keys() == to_rank_0.keys()
    assert all(map(torch.equal, kept.values(), to_rank_0.values()))
    embedding = next(
        (p for c in chunks for n, p in c.named_parameters() if "word_embeddings" in n), None
    )
    padding = None
    if embedding is not None:
        real = max(0, min(embedding.shape[0], spec.vocab - parallel.tp_rank * embedding.shape[0]))
        padding = embedding[real:].detach().clone()
    return {
        "to_rank_0": to_rank_0,
        "to_all": to_all,
        "written": _write_parts(gatherer),
        "fingerprints": gatherer.fingerprints(),
        "changes": _changes(gatherer),
        "sends": {
            (run.name, run.dim, run.start, run.length): rank
            for bucket in gatherer.buckets
            for rank, runs in gatherer._by_source(_names(bucket), None).items()
            for run in runs
        },
        "buckets": len(gatherer.buckets),
        "padding": padding,
    }


def _names(bucket):
    return [tensor.meta.name for tensor in bucket.tensors]


class _Traffic:
    """Bytes that this rank gets by broadcasts, and what it gets from and gives to single ranks."""

    def __init__(self):
        self.broadcast = self.received = self.given = 0

    def __enter__(self):
        self._originals = {name: getattr(dist, name) for name in ("broadcast", "batch_isend_irecv")}
        dist.broadcast, dist.batch_isend_irecv = self._broadcast, self._batch
        return self

    def __exit__(self, *_):
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _broadcast(self, tensor, source, **named):
        if source != dist.get_rank():
            self.broadcast += tensor.nbytes
        return self._originals["broadcast"](tensor, source, **named)

    def _batch(self, operations):
        for one in operations:
            if one.op is dist.isend:
                self.given += one.tensor.nbytes
            else:
                self.received += one.tensor.nbytes
        return self._originals["batch_isend_irecv"](operations)


def expert_exchange(folder, case, bucket_size_mib, shares):
    """Two updates with other weights each, and one after the ranks have met again.

    Args:
        shares: Experts that each rank needs.

    Returns:
        ``whole`` and ``shared`` of each update, tensors by name as all ranks get all and as each
        gets its share; ``whole_bytes`` and ``shared_bytes``: see ``_Traffic``. ``holds``: this
        rank's runs.
    """
    from rlmath.weights.gather import BucketGatherer

    chunks, spec, parallel = _load(folder, case)
    found = []
    for update in range(3):
        if update != 1:
            gatherer = BucketGatherer(chunks, spec, parallel, bucket_size_mib)
            routes = gatherer.expert_routes(shares[dist.get_rank()])
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(-1.5)
        with _Traffic() as whole:
            tensors = dict(pair for bucket in gatherer.gather(None) for pair in bucket)
        with _Traffic() as shared:
            own = dict(pair for bucket in gatherer.gather(None, routes) for pair in bucket)
        found.append(
            {
                "whole": tensors,
                "shared": own,
                "whole_bytes": (whole.broadcast, whole.received, whole.given),
                "shared_bytes": (shared.broadcast, shared.received, shared.given),
                "holds": set(gatherer._local),
                "routed": routes is not None,
            }
        )
    return found


def _changes(gatherer):
    """Check that this rank's parts are all new at first, and then all but the changed one stay."""
    first = gatherer.changes()
    if first.unchanged is not None or first.fingerprints != gatherer.fingerprints():
        return False
    run, place = next(iter(gatherer._local.items()))
    values = place.parameter.detach().narrow(place.dim, place.start, place.length)
    kept = values.clone()
    values += 1
    changed = gatherer.changes()
    values.copy_(kept)
    again = gatherer.changes()
    others = {one for one in gatherer._local if one != run}
    return set(changed.unchanged) == others == set(again.unchanged)


def _write_parts(gatherer):
    """Each rank writes its part of a zeroed buffer; their sum is the whole if none overlap."""
    from rlmath.weights.buckets import view_in_buffer

    result = {}
    for bucket in gatherer.buckets:
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        gatherer.write_local(bucket, buffer)
        dist.all_reduce(buffer, group=gatherer.parallel.group)
        for tensor in bucket.tensors:
            result[tensor.meta.name] = view_in_buffer(buffer, tensor).clone()
    return result


def refusal(folder, case):
    """Error of a rank that refuses the folder's weights; ``None``: it loads them."""
    from rlmath.errors import WeightsError

    try:
        _load(folder, case)
    except WeightsError as error:
        return str(error)
    return None


def planted_difference(folder, case, name):
    """Change a parameter on the last rank alone; what the check of replicas says to it."""
    from rlmath.weights.gather import BucketGatherer

    chunks, spec, parallel = _load(folder, case)
    if dist.get_rank() == WORLD_SIZE - 1:
        with torch.no_grad():
            dict(chunks[0].named_parameters())[name].view(-1)[0] += 0.001
    return BucketGatherer(chunks, spec, parallel).find_drift() or "nothing"


def save_checkpoint(folder, case, target):
    """Load a folder into an actor of this layout and save it as a run does."""
    from rlmath.checkpoint.state import save_model

    save_model(_actor(folder, case, torch.float32), target)


def _actor(folder, case, dtype):
    from rlmath.actor.model import ModelSettings
    from rlmath.actor.policy import MegatronActor
    from rlmath.actor.settings import ActorSettings
    from rlmath.device import CPU
    from rlmath.model.parallel import Layout

    _layouts[0].enter(case)
    copies = WORLD_SIZE // case.tp // case.pp
    layout = Layout(case.tp, case.pp, copies, expert_parallel=case.ep)
    model = ModelSettings(dtype, sequence_parallel=case.ep > 1 and case.tp > 1)
    return MegatronActor(ActorSettings(folder, model, None, 1.0, 4096, 128), layout, CPU)


def convert(function, *arguments):
    """Call a function of ``rlmath.validation.convert``; its result, or the error's message."""
    from rlmath.device import CPU
    from rlmath.errors import UserError
    from rlmath.validation import convert

    _layouts[0].enter(Case())
    try:
        return getattr(convert, function)(CPU, *arguments)
    except UserError as error:
        return str(error)


def alignment_with_fault(folder, case, fault, dtype=torch.float32):
    """Load a folder, damage the model, compare it with the folder.

    Returns:
        On rank 0: mean exp|difference| of log-probs, where the models part, and the report's
        message.
    """
    from rlmath.errors import UserError
    from rlmath.validation.compare import compare
    from rlmath.validation.probe import random_batch

    actor = _actor(folder, case, dtype)
    with torch.no_grad():
        _damage(actor, fault)
    report = compare(actor, folder, random_batch(folder))
    if report is None:
        return None
    try:
        report.check()
        message = "good"
    except UserError as error:
        message = str(error)
    return report.comparisons[0].metrics()["mean_exp_abs_diff"], report.difference, message


def _damage(actor, fault):
    model, spec = actor.module, actor.spec
    layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
    if fault == "k and v swapped" and 2 in layers:
        qkv = layers[2].self_attention.linear_qkv.weight
        heads = qkv.view(spec.kv_heads // actor.parallel.tp_size, -1, spec.head_dim, spec.hidden)
        heads[:, -2:] = heads[:, -2:].flip(1).clone()
    elif fault == "wrong rope theta":
        model.rotary_pos_emb.inv_freq.pow_(0.5)
    elif fault == "gate and up swapped" and 1 in layers:
        fc1 = layers[1].mlp.linear_fc1.weight
        fc1.copy_(torch.cat(fc1.chunk(2)[::-1]))
    elif fault == "a router's bias left out" and 2 in layers:
        layers[2].mlp.router.expert_bias.zero_()
    elif fault == "a latent vector's norm left out" and 2 in layers:
        layers[2].self_attention.kv_layernorm.weight.fill_(1)
    elif fault == "one layer shifted":
        for own, next_one in zip(layers[1].parameters(), layers[2].parameters(), strict=True):
            own.copy_(next_one)
    elif fault == "one flipped bit" and 3 in layers and actor.parallel.tp_rank == 0:
        # The highest bit of the exponent: 2**128 times as much.
        weight = layers[3].mlp.linear_fc2.weight
        weight.view(torch.int32)[5, 7] ^= 1 << 30


def logits(folder, case, sequences):
    """``[tokens, vocab]`` float32 of the sequences end to end, on ranks of the last stage."""
    from megatron.core import parallel_state as state

    chunks, spec, _ = _load(folder, case)
    (model,) = chunks
    num_tokens = sum(map(len, sequences))
    with torch.no_grad():
        if case.is_plain():
            parts = []
            for tokens in sequences:
                one = _forward(model, *_one_sequence(tokens, case.tp), None)
                parts += [] if one is None else [one[:, : len(tokens)]]
            out = torch.cat(parts, 1) if parts else None
        else:
            out = _forward(model, *_pack(sequences, case.tp))
        if out is None:
            return None
        parts = [torch.empty_like(out) for _ in range(case.tp)]
        dist.all_gather(parts, out, group=state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)[0, :num_tokens, : spec.vocab].clone()


def _one_sequence(tokens, tp):
    """Padded at the end, which a causal model does not see, to what tensor ranks share evenly."""
    padded = tokens + [0] * (-len(tokens) % tp)
    n = len(padded)
    mask = torch.ones(1, 1, n, n, dtype=torch.bool).triu(1)
    return torch.tensor([padded]), torch.arange(n)[None], mask


def _pack(sequences, tp):
    from rlmath.actor.packing import pack
    from rlmath.device import CPU
    from rlmath.model.parallel import Layout
    from rlmath.types import MicroBatch

    n = len(sequences)
    lengths = torch.tensor([len(s) for s in sequences])
    tokens = torch.tensor([token for s in sequences for token in s])
    batch = batch_of_lengths(torch.ones_like(lengths), lengths - 1, tokens=tokens)
    packed = pack(batch, MicroBatch(tuple(range(n)), int(lengths.sum())), CPU, Layout(tp, 1, 1))
    return packed.tokens, packed.position_ids, None, packed.packed_seq_params


def _forward(model, tokens, positions, mask, packed):
    """Through all pipeline stages by hand; ``[1, t, vocab / tp]`` on the last, else ``None``."""
    from megatron.core import parallel_state as state

    model.eval()
    group = state.get_pipeline_model_parallel_group()
    if not state.is_pipeline_first_stage():
        hidden = torch.empty(tokens.shape[1], 1, model.config.hidden_size)
        dist.recv(hidden, state.get_pipeline_model_parallel_prev_rank(), group=group)
        model.set_input_tensor(hidden)
    out = model(tokens, positions, mask, packed_seq_params=packed)
    if not state.is_pipeline_last_stage():
        dist.send(out.contiguous(), state.get_pipeline_model_parallel_next_rank(), group=group)
        return None
    return out


def save(folder, case, target):
    """Number of buckets, and whether it is by gloo alone, of each time that this rank waits for all
    others."""
    from rlmath.checkpoint.writer import background_group
    from rlmath.weights.gather import BucketGatherer
    from rlmath.weights.megatron import save_to_hf

    chunks, spec, parallel = _load(folder, case)
    gatherer = BucketGatherer(chunks, spec, parallel, bucket_size_mib=0.05)
    with mock.patch.object(dist, "barrier", wraps=dist.barrier) as wait:
        save_to_hf(gatherer, spec, target, folder, shard_size_mib=1)
    groups = [call.kwargs.get("group") for call in wait.call_args_list]
    return len(gatherer.buckets), [group is background_group() for group in groups]
