"""Number types of the configuration fields; msgspec enforces their limits when a value is converted."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
