"""Which methods go with a model. Layers whose softmax is not plain are attended by few formats and kinds."""

from __future__ import annotations

from functools import lru_cache

from kvferry.shared.compression.attention.kinds import ATTENTIONS
from kvferry.shared.compression.formats import format_class
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.presets import method_names, preset
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import LayerSpec


@lru_cache(maxsize=16)
def applicable_methods(layers: tuple[LayerSpec, ...]) -> tuple[str, ...]:
    """The methods that go with a model. Args: layers: as `ModelSpec.layers`."""
    return tuple(name for name in method_names() if _refusing_layer(preset(name), layers) is None)


def check_applicable(plan: CompressionPlan, layers: tuple[LayerSpec, ...]) -> None:
    """Raises: InvalidRequest: the plan does not go with the model; names the layer, and methods that do."""
    layer = _refusing_layer(plan, layers)
    if layer is not None:
        raise InvalidRequest(
            f"method {plan.method!r} does not go with this model: layer {layer} has soft-capped logits or "
            f"attention sinks; methods that do: {', '.join(applicable_methods(layers))}",
            param="kv_compression.method",
        )


def _refusing_layer(plan: CompressionPlan, layers: tuple[LayerSpec, ...]) -> int | None:
    """The first layer that the plan's parts cannot attend to."""
    kind = ATTENTIONS.get(plan.attention.name)
    takes_any = format_class(plan.representation).takes_any_softmax and kind is not None
    if takes_any and kind is not None and kind.takes_any_softmax:
        return None
    odd = (i for i, its in enumerate(layers) if not its.has_plain_softmax and not its.window)
    return next(odd, None)
