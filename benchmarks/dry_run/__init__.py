"""Dry runs: one rank of a GPU layout without a GPU, its memory counted.

The project's own model, DDP wrapper, optimizer, pipeline schedule, weight gather and checkpoint run
on meta tensors, which have shapes and no values, with torch's fake process group in the place of
the other ranks. Every storage is counted while it lives, so each phase has a peak in bytes.

It imitates a GPU rank, and counts what the program allocates. It does not count workspaces inside
kernels, the allocator's fragmentation, CUDA's context and NCCL's buffers, and routing in an MoE is
even. Layers are Megatron's own (``local``), with the fused kernels that a
GPU has for norms and attention; what Transformer Engine's layers keep is in the closed form of
``rlmath/commands/plan/memory.py`` and is not counted here.

``jobs.py`` says what to count, ``rank.py`` counts it, ``meta_gpu.py`` and ``groups.py`` take the
place of the GPU and of the other ranks, ``meter.py`` counts, ``pool.py`` runs jobs in processes of
their own: what a dry run replaces in torch and Megatron stays replaced in its process.
"""
