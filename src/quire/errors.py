"""The errors that cross a room's border. Each says what is wrong, where, and what to do about it."""

from __future__ import annotations

from typing import Any


class QuireError(Exception):
    """Base of all of ours."""


class ValidationError(QuireError, ValueError):
    """A request, or one of its parameters, cannot be served as it is. HTTP 400."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None):
        super().__init__(message)
        self.parameter, self.value = parameter, value


class Unsupported(QuireError, NotImplementedError, ValueError):
    """A feature that exists by name and is not here yet (or not on this platform). HTTP 501."""

    def __init__(self, feature: str, remedy: str = ""):
        super().__init__(f"{feature} is not supported yet{': ' + remedy if remedy else '.'}")
        self.feature = feature


class ConfigError(QuireError, ValueError):
    """What was asked for at start does not fit together. The message names the flag to change."""


class NotEnoughMemory(ConfigError):
    """The memory plan does not work out; the message has the numbers and the one flag to change."""


class ModelNotFound(ConfigError):
    """No checkpoint where we looked; the message says where that was."""


class StartupError(QuireError, RuntimeError):
    """The engine did not come up; the message is its own. `detail` is its traceback, if there is one."""

    def __init__(self, message: str, detail: str = ""):
        super().__init__(message)
        self.detail = detail


class StepFailed(QuireError, RuntimeError):
    """A step could not be run, but the device is sound: its requests end with an error, others go on."""


class EngineDeadError(QuireError, RuntimeError):
    """The engine cannot answer any more; the message says why."""


class EngineDelayed(QuireError, RuntimeError):
    """The engine died too often; it is started again later. HTTP 503 with Retry-After. `incident` is in the log."""

    def __init__(self, incident: str):
        super().__init__(
            f"the engine failed and is started again later ({incident} in the server's log)"
        )
        self.incident = incident


class Conflict(QuireError, RuntimeError):
    """Somebody else wanted otherwise meanwhile. HTTP 409."""


class QueueFull(QuireError, RuntimeError):
    """Too many requests wait. HTTP 503 with Retry-After."""
