"""Quire's exceptions. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from typing import Any


class QuireError(Exception):
    """Base class of Quire's exceptions."""


class InternalError(QuireError):
    """The engine failed on a request. The text is for a program and for logs; a server does not send it to clients."""


class ProcessorFailed(InternalError, RuntimeError):
    """A logits processor raised an exception on a request; the log has it."""


class ValidationError(QuireError, ValueError):
    """A request, or one of its parameters, is invalid. HTTP 400."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None):
        super().__init__(message)
        self.parameter, self.value = parameter, value


class NotFetched(ValidationError):
    """What a request names by a URL could not be fetched. HTTP 422."""


class Unsupported(QuireError, NotImplementedError, ValueError):
    """A known feature that is not implemented yet, or not on this platform. HTTP 400."""

    def __init__(self, feature: str, remedy: str = ""):
        super().__init__(f"{feature} is not supported yet{': ' + remedy if remedy else '.'}")
        self.feature = feature


class ConfigError(QuireError, ValueError):
    """The configuration is invalid or contradicts itself. The message names the flag to change."""


class NotEnoughMemory(ConfigError):
    """The memory plan does not fit; the message has the numbers and the one flag to change."""


class ModelNotFound(ConfigError):
    """No checkpoint was found; the message says where Quire searched."""


class StartupError(QuireError, RuntimeError):
    """The engine did not start; the message gives its error. `detail` is the engine's traceback, if there is one."""

    def __init__(self, message: str, detail: str = ""):
        super().__init__(message)
        self.detail = detail


class StepFailed(QuireError, RuntimeError):
    """A step failed, but the device still works: the step's requests end with an error, other requests go on."""


class PlanMismatch(RuntimeError):
    """A plan contradicts a worker's rows. The worker's state cannot be trusted, so the error is not limited to one step."""


class EngineDeadError(QuireError, RuntimeError):
    """The engine has died or was shut down; the message says why."""


class RankLost(EngineDeadError):
    """Another rank of the same engine did not take part in an exchange: this one cannot go on."""


class ExpertsLost(QuireError, RuntimeError):
    """Another engine, which has experts of this model, does not answer: the step's requests end with an error."""


class EngineDelayed(QuireError, RuntimeError):
    """The engine died too often and restarts later. HTTP 503 with Retry-After. The log names the same `incident`."""

    def __init__(self, incident: str):
        super().__init__(
            f"the engine failed and will be restarted later (see the server's log under {incident})"
        )
        self.incident = incident


class Conflict(QuireError, RuntimeError):
    """Another call changed the state in the meantime. HTTP 409."""


class QueueFull(QuireError, RuntimeError):
    """Too many requests wait. HTTP 503 with Retry-After."""


NOT_FINITE = (
    "the model's output for this request is not a number (NaN or infinite logits); its weights or dtype"
    " may not fit this input: try dtype=float32 or bfloat16"
)
"""The error of a row whose logits are not finite."""
