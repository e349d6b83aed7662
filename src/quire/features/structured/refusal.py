"""The one error of this feature: a constraint that cannot be enforced as it stands."""

from __future__ import annotations


class Refused(ValueError):
    """The message names the keyword or the place; whoever knows the request's field puts it before."""
