"""The sections of layers in their order: what prefill sends of a compressed layer, what a manifest announces.

Place in the request's path: prefill cuts a compressed layer into sections; a layer whose representation fixes
their sizes has them announced in the manifest, which decode compares with its own. A tensor's section is that
of its name. Sections that depend on a layout sent before them are `packed_sections.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvferry.shared.cache.layout import TORCH_DTYPES
from kvferry.shared.compression.interface import CompressedLayer
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.representation import stored_specs
from kvferry.shared.compression.representations.interface import PromptShape, Specs
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import Section, SectionSize
from kvferry.shared.wire.packed_sections import KIND_SECTIONS, packed_sections


def layer_specs(spec: ModelSpec, resolved: ResolvedPlan) -> tuple[Specs, ...]:
    """Of each layer the tensors whose sizes its representation fixes; none of rows and of RDKV's layers."""
    return tuple(
        stored_specs(
            layer,
            PromptShape(
                rows=layer.rows,
                num_tokens=resolved.num_prompt_tokens,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=TORCH_DTYPES[spec.dtype],
            ),
        )
        for layer in resolved.layers
    )


def announced_sections(spec: ModelSpec, resolved: ResolvedPlan) -> tuple[tuple[SectionSize, ...], ...]:
    """What a manifest's `layer_sections` must be."""
    layers = tuple(
        tuple(
            SectionSize(section=section_of(name), size_bytes=wanted.size_bytes)
            for name, wanted in its.items()
        )
        for its in layer_specs(spec, resolved)
    )
    return layers if any(layers) else ()


def section_of(name: str) -> Section:
    """The section that carries a tensor of a `StoredPrompt`."""
    return Section[name.upper()]


def layer_sections(kept: CompressedLayer) -> Iterator[tuple[Section, Tensor]]:
    """A compressed layer as the sections to send."""
    if kept.packed is not None:
        yield from packed_sections(kept.packed)
        return
    prompt = kept.stored or kept.wire
    if prompt is not None:
        for name, tensor in prompt.tensors.items():
            section = section_of(name)
            yield section, tensor.view(torch.uint8) if section in KIND_SECTIONS else tensor
        return
    if kept.positions is not None:
        yield Section.INDEX, kept.positions
    yield Section.KEYS, kept.keys
    yield Section.VALUES, kept.values
    if kept.state is not None:
        yield Section.STATE, kept.state
