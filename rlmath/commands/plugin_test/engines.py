"""Invariants of the parts of engines: model family, weight transport, engine
arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.commands.plugin_test.finding import Finding, findings, repeats
from rlmath.config.engine_arguments import ENGINE_ARGUMENTS, further_arguments
from rlmath.engines.transport import MIB, TRANSPORTS, SyncSizes, transport_named
from rlmath.model.families import FAMILIES, FAMILY_PLUGINS, Family
from rlmath.model.spec import model_spec
from rlmath.model.tiny import tiny_config


def check_family(name: str) -> Iterator[Finding]:
    part = _Family(name)
    return findings(
        {
            "result is a family with architectures": part.result,
            "its architectures are its own": part.own_architectures,
            "each tensor has one place": part.places,
            "sizes are known": part.sizes,
        }
    )


@dataclass(frozen=True)
class _Family:
    name: str

    def make(self) -> Family:
        return FAMILY_PLUGINS.get(self.name)()

    def result(self) -> Iterator[str]:
        found: Any = self.make()
        if not isinstance(found, Family):
            yield f"it is a {type(found).__name__}"
        elif not found.architectures or not found.entries:
            yield f"{len(found.architectures)} architectures, {len(found.entries)} entries"

    def own_architectures(self) -> Iterator[str]:
        others = [
            one
            for name in FAMILY_PLUGINS.names()
            if name != self.name
            for one in FAMILY_PLUGINS.get(name)().architectures
        ]
        known = {*others, *(one for family in FAMILIES for one in family.architectures)}
        for architecture in self.make().architectures:
            if architecture in known:
                yield f"{architecture} is another family's"

    def places(self) -> Iterator[str]:
        seen: set[tuple[str, Any]] = set()
        for entry in self.make().entries:
            for tensor in entry.hf:
                key = (tensor.name, entry.when)
                if key in seen:
                    yield f"{tensor.name} is in two entries"
                seen.add(key)

    def sizes(self) -> Iterator[str]:
        family = self.make()
        spec = model_spec(tiny_config() | {"architectures": [family.architectures[0]]})
        for tensor in (one for entry in family.entries for one in entry.hf):
            of_experts = {"experts", "moe_ffn", "shared_ffn"} & {*tensor.dims}
            if "{expert}" in tensor.name or (spec.experts == 0 and of_experts):
                continue
            for dim in tensor.dims:
                if spec.size(dim) < 1:
                    yield f"{tensor.name}: {dim} is {spec.size(dim)}"


def check_transport(name: str) -> Iterator[Finding]:
    def fits() -> Iterator[str]:
        places = list(itertools.product(("cpu", "cuda"), (False, True)))
        found = [transport_named(name).fits(*place) for place in places]
        if not all(isinstance(one, bool) for one in found):
            yield f"fits() is {found}, not true or false"
        elif not any(found):
            yield "fits() is false on CPU and on CUDA, with colocated and with separate GPUs"

    def backend() -> Iterator[str]:
        one = transport_named(name)
        if not isinstance(getattr(one, "backend", None), str):
            yield "backend, vLLM's name for its workers' side, is not given"
        if one.adapters is not None and one.adapters not in TRANSPORTS.names():
            yield f"adapters={one.adapters}: there are {', '.join(TRANSPORTS.names())}"

    def buffers() -> Iterator[str]:
        last = (0, 0)
        for bucket in (1, 64, 512):
            planned = transport_named(name).plan_bytes(SyncSizes(bucket * MIB, 4 * MIB))
            found = (planned.trainer_bytes, planned.engine_bytes)
            if any(now < before for now, before in zip(found, last, strict=True)):
                yield f"with buckets of {bucket} MiB it plans {found} bytes, and {last} with less"
            last = found

    return findings(
        {
            "it fits somewhere": fits,
            "vLLM's workers have an end": backend,
            "buffers do not shrink with the bucket": buffers,
        }
    )


def check_engine_arguments(name: str) -> Iterator[Finding]:
    options = ENGINE_ARGUMENTS.options(name)()

    def read() -> list[dict[str, Any]]:
        return [further_arguments(name, device, options) for device in ("cpu", "cuda")]

    def fits() -> Iterator[str]:
        read()
        yield from ()

    return findings(
        {"vLLM has them, and rlmath does not give them": fits, "deterministic": repeats(read)}
    )
