"""Megatron ranks for the tools: this process as the only rank, or a process for each."""

from __future__ import annotations

import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._device import _device_constructors

from rlmath.actor.parallel import destroy, initialize
from rlmath.device import Platform, choose_platform
from rlmath.errors import UserError
from rlmath.model.parallel import Layout
from rlmath.plugins.loading import Source, receive, sources

ONE_RANK = Layout(tensor_parallel=1, pipeline_parallel=1, data_parallel=1)


def open_process() -> Platform:
    """Make this process the only Megatron rank; call it once."""
    return _open_rank(ONE_RANK, 0, free_port())


def on_ranks(layout: Layout, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call ``function(platform, *arguments)`` on each rank, each in a separate process.

    Args:
        function: A module-level function, so that new processes find it.

    Returns:
        The result of rank 0.

    Raises:
        UserError: A rank failed; the message is its own ``UserError``'s, or names the rank and ends
            with its traceback.
    """
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

    with tempfile.TemporaryDirectory() as work:
        try:
            spawn(
                _rank,
                (layout, free_port(), work, sources(), function, arguments),
                nprocs=layout.world_size,
            )
        except (ProcessRaisedException, ProcessExitedException) as error:
            said = sorted(Path(work).glob("error_*"))
            if said:
                raise UserError(said[0].read_text(encoding="utf-8")) from None
            raise UserError(f"rank {error.error_index} of {layout} failed: {error}") from None
        return torch.load(Path(work) / "result.pt", weights_only=False)


def _rank(
    rank: int,
    layout: Layout,
    port: int,
    work: str,
    plugins: tuple[Source, ...],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    receive(plugins)
    try:
        result = function(_open_rank(layout, rank, port), *arguments)
    except UserError as error:
        (Path(work) / f"error_0_{rank}").write_text(str(error), encoding="utf-8")
        raise
    except Exception as error:
        # A rank that others abandoned fails as well: its message ranks behind a UserError's.
        text = f"rank {rank} failed: {error}\n{traceback.format_exc()}"
        (Path(work) / f"error_1_{rank}").write_text(text, encoding="utf-8")
        raise
    if rank == 0:
        torch.save(result, Path(work) / "result.pt")
    # A process that exits with open groups may abort in one of gloo's threads.
    destroy()


def _open_rank(layout: Layout, rank: int, port: int) -> Platform:
    # torch lists the functions that `with torch.device(...)` acts on at its first use. The CPU shim
    # replaces some of these, so the list has to be made before: transformers builds models under
    # such a context, and would leave their rotary frequencies uninitialized.
    _device_constructors()
    platform = choose_platform("auto", layers="any")
    threads = max(1, torch.get_num_threads() // layout.world_size)
    platform.prepare_megatron_process(local_rank=rank, num_threads=threads)
    initialize(layout, platform, rank=rank, address="127.0.0.1", port=port, seed=0)
    return platform


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
