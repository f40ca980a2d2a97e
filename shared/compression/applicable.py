"""Which methods go with a model. Few formats and attention kinds support soft-capped logits or attention
sinks, and formats that treat K and V differently cannot store latent rows (MLA). States are shipped whole
with every method; a model in which no layer attends has nothing to compress."""

from __future__ import annotations

from functools import lru_cache

from kvferry.shared.compression.attention import attentions
from kvferry.shared.compression.formats import format_class
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.presets import method_names, preset
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import LayerSpec


@lru_cache(maxsize=16)
def applicable_methods(layers: tuple[LayerSpec, ...]) -> tuple[str, ...]:
    """Return the methods that go with a model. Args: layers: as `ModelSpec.layers`."""
    return tuple(name for name in method_names() if _problem(preset(name), layers) is None)


def check_applicable(plan: CompressionPlan, layers: tuple[LayerSpec, ...]) -> None:
    """Check that a plan goes with a model.

    Raises: InvalidRequest: it does not; the message names the layer, and methods that do.
    """
    problem = _problem(plan, layers)
    if problem is not None:
        raise InvalidRequest(
            f"method {plan.method!r} does not go with this model: {problem}; methods that do: "
            f"{', '.join(applicable_methods(layers))}",
            param="kv_compression.method",
        )


def _problem(plan: CompressionPlan, layers: tuple[LayerSpec, ...]) -> str | None:
    """Say why the plan does not go with these layers, naming the first that rules it out; None if it does."""
    if layers and not any(spec.has_rows for spec in layers):
        return None if plan.method == "full" else "no layer attends, so there is no KV to compress"
    kind, fmt = attentions().get(plan.attention.name), format_class(plan.representation)
    takes_any = fmt.takes_any_softmax and kind is not None and kind.takes_any_softmax
    for number, layer in enumerate(layers):
        if layer.window:
            continue
        if not layer.has_plain_softmax and not takes_any:
            return f"layer {number} has soft-capped logits or attention sinks"
        if layer.latent_dim and not fmt.takes_latent_rows:
            return (
                f"layer {number} has latent rows (MLA), each of them key and value at once, and format "
                f"{plan.representation.name!r} treats keys and values differently"
            )
    return None
