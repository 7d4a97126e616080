"""What checkpoints rely on in the installed Megatron-core, and what breaks when it changes."""

import pytest
import torch.distributed as dist

from rlmath.actor import parallel
from rlmath.device import Platform
from rlmath.model.parallel import Layout
from tests.contracts.contract import Row, check, parametrized


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_no_gloo_group_is_made_beside_megatrons_own(monkeypatch, backend):
    """Each of them costs every process a thread and a rendezvous, and nothing uses them: optimizer
    and checkpoints are built without (``use_gloo_process_groups=False``, a separate group)."""
    from megatron.core import parallel_state, tensor_parallel

    given = {}
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **k: given.update(k))
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(parallel, "background_group", lambda: None)
    platform = Platform("cuda", backend, "local")
    parallel.initialize(Layout(2, 1, 4), platform, 1, "127.0.0.1", 1, seed=0)
    assert given["create_gloo_process_groups"] is False


OFFLOAD = "rlmath/actor/offload.py"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
FORMAT = "megatron.core.dist_checkpointing"
GATHER = "rlmath/actor/parameter_gather.py"
SHARDS = "rlmath/checkpoint/optimizer_shards.py"
ROWS = [
    Row(
        OPTIMIZER,
        has=("buffers", "gbuf_ranges", "data_parallel_group", "init_state_fn", "optimizer"),
        breaks=f"the optimizer's tensors cannot be gathered ({SHARDS})",
    ),
    Row(
        f"{OPTIMIZER}.sharded_param_state_fully_reshardable",
        passes=("model_sharded_state_dict", "is_loading", "metadata"),
        says=("key=f'{prefix}.{state_key}.{sharded_metadata.key}'", "prefix = 'optimizer.state'"),
        breaks=f"our replacement is called otherwise, or saves under other keys ({SHARDS})",
    ),
    Row(
        f"{OPTIMIZER}.sharded_state_dict",
        says=(
            "self.sharded_param_state_fully_reshardable(",
            "sharding_type == 'fully_reshardable'",
        ),
        breaks=f"Megatron gathers them again: GPU and host run out of memory ({SHARDS})",
    ),
    Row(
        f"{OPTIMIZER}.load_parameter_state_from_fully_reshardable",
        says=("param_idx += 1  # increment", "if model_param not in all_buckets_param_range_map:"),
        breaks=f"a load wants parameters of which a rank holds nothing ({SHARDS})",
    ),
    Row(
        f"{OPTIMIZER}._get_main_param_and_optimizer_states",
        says=('tensors = {"param": main_param, **optim_state}',),
        breaks=f"main parameters and moments are found otherwise ({SHARDS})",
    ),
    Row(
        f"{OPTIMIZER}._build_model_gbuf_param_range_map",
        says=('"gbuf_local": param_local_range', '"param": sub_param_range'),
        breaks=f"parts of parameters are taken for others ({SHARDS})",
    ),
    Row(
        f"{OPTIMIZER}._get_model_param_range_map",
        says=("self.model_param_gbuf_map[param]", 'gbuf_range_map["param_map"][param]'),
        breaks="digests of gradients count what is not reduced (weights/tensor_prints.py)",
    ),
    Row(
        f"{BUFFERS}:_ParamAndGradBuffer",
        has=("buckets", "param_index_map"),
        says=("self.param_index_map[param] = (param_start_index, param_end_index, bucket_id)",),
        breaks=f"parameters are looked for at other places of a bucket ({SHARDS})",
    ),
    Row(
        f"{BUFFERS}:_ParamAndGradBuffer",
        has=("param_data", "grad_data"),
        says=(
            "param.data = new_param_data",
            "param.main_grad = self._get(",
            "self.grad_data.storage().resize_(0)",
        ),
        breaks=f"state that is moved out is not all of it, or does not come back ({OFFLOAD})",
    ),
    Row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        has=("buffers", "expert_parallel_buffers"),
        breaks=f"gradients are not given back ({OFFLOAD})",
    ),
    Row(
        f"{OPTIMIZER}._build_model_and_main_param_groups",
        says=(
            "shard_main_param = shard_model_param.clone().float()",
            "*shard_fp32_params_this_group,",
            "*shard_fp32_from_float16_params_this_group,",
        ),
        breaks=f"main parameters are not those of the inner optimizer's groups ({OFFLOAD})",
    ),
    Row(
        f"{OPTIMIZER}.zero_grad",
        says=("_zero_grad_group_helper(",),
        breaks=f"main parameters keep gradients, whose storage is moved away ({OFFLOAD})",
    ),
    Row(
        f"{BUFFERS}:_ParamAndGradBucket",
        has=("offset", "grad_data"),
        breaks=f"parameters are looked for at other places of a bucket ({SHARDS})",
    ),
    Row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        says=("if not ddp_config.overlap_grad_reduce:\n            ddp_config.bucket_size = None",),
        breaks=f"a DDP bucket is no longer the whole stage: {SHARDS} says it is",
    ),
    Row(
        f"{BUFFERS}:_ParamAndGradBucketGroup",
        has=("param_gather_handle", "param_gather_dispatched"),
        says=(
            "async_op = self.ddp_config.overlap_param_gather and not force_sync",
            "self.param_gather_handle.wait()\n                self.param_gather_handle = None\n"
            "                return",
            "if not self.param_gather_dispatched:\n            self.start_param_sync()",
        ),
        breaks=f"to complete parameters is more than to wait for what is under way ({GATHER})",
    ),
    Row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        has=("bucket_groups", "expert_parallel_bucket_groups"),
        says=("self.ddp_config.align_param_gather\n", "module.register_forward_pre_hook("),
        breaks=f"modules do not wait for their own bucket alone ({GATHER})",
    ),
    Row(
        f"{OPTIMIZER}.step_with_ready_grads",
        says=("if not self.ddp_config.overlap_param_gather:",),
        breaks=f"the optimizer gathers, or nobody does ({GATHER})",
    ),
    Row(
        "megatron.core.optimizer:get_megatron_optimizer",
        takes=("use_gloo_process_groups",),
        breaks="the optimizer wants gloo groups, which are not made (actor/parallel.py)",
    ),
    Row(
        f"{FORMAT}.mapping:ShardedTensor",
        fields=("key", "data", "dtype", "replica_id"),
        breaks=f"the place of a tensor in the whole is described otherwise ({SHARDS})",
    ),
    Row(
        f"{FORMAT}.mapping:ShardedTensorFactory",
        fields=("key", "data", "replica_id"),
        breaks=f"the place of a tensor in the whole is described otherwise ({SHARDS})",
    ),
    Row(
        f"{FORMAT}.exchange_utils:determine_main_replica_uniform_distribution",
        takes=("sharded_state_dict", "parallelization_group"),
        breaks="data-parallel ranks cannot share out the writing (checkpoint/state.py)",
    ),
    Row(
        f"{FORMAT}.strategies.torch:_replace_state_dict_keys_with_sharded_keys",
        takes=("sharded_state_dict", "keep_only_main_replica"),
        breaks="tensors cannot be written (checkpoint/writer.py)",
    ),
    Row(
        f"{FORMAT}.strategies.torch:MCoreSavePlanner",
        takes=("dedup_replicated_tensors", "flatten_state_dict"),
        breaks="tensors cannot be written (checkpoint/writer.py)",
    ),
    Row(
        f"{FORMAT}.core:CheckpointingConfig",
        takes=("sharded_backend", "sharded_backend_version"),
        breaks="a checkpoint cannot be recognized by Megatron (checkpoint/writer.py)",
    ),
    Row(
        f"{FORMAT}.serialization:load",
        takes=("sharded_state_dict", "checkpoint_dir", "strict"),
        breaks="a checkpoint cannot be read (checkpoint/state.py)",
    ),
]


@parametrized(ROWS)
def test_contract(row):
    check(row)
