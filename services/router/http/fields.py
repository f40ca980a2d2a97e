"""Types of request fields whose errors name what is allowed; `errors.py` words them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class StrictModel(BaseModel):
    """No conversions, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


@dataclass(frozen=True)
class Range:
    """Bounds of a number; an error states both."""

    low: float
    high: float | None = None
    excludes_low: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        low = {"exclusiveMinimum" if self.excludes_low else "minimum": self.low}
        return {**handler(schema), **low, **({} if self.high is None else {"maximum": self.high})}

    def _check(self, value: float) -> float:
        too_low = value <= self.low if self.excludes_low else value < self.low
        if too_low or (self.high is not None and value > self.high):
            lower = f"{'above' if self.excludes_low else 'at least'} {self.low}"
            raise PydanticCustomError(
                "range", lower if self.high is None else f"{lower} and at most {self.high}"
            )
        return value


@dataclass(frozen=True)
class Unsupported:
    """A field of OpenAI's whose effect a client would miss, with the values that ask for nothing."""

    neutral: Any = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        neutral = self.neutral if isinstance(self.neutral, tuple) else (self.neutral,)
        if value is not None and value not in neutral:
            raise PydanticCustomError("unsupported", "is not supported by this server")
        return value


Ignored = Annotated[Any, Field(description="accepted and ignored")]
"""A field of OpenAI's that changes nothing about the answer here."""
