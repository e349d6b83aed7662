"""Errors of pictures. Each message begins with the JSON path of the part; none has text of a library or a path of this machine."""

from __future__ import annotations

from quire.errors import NotFetched, ValidationError


def refused(where: str, why: str) -> ValidationError:
    """HTTP 400: the request must change."""
    return ValidationError(f"`{where}`: {why}", parameter=where)


def not_fetched(where: str, why: str) -> NotFetched:
    """HTTP 422: what the part names could not be fetched."""
    return NotFetched(f"`{where}`: {why}", parameter=where)
