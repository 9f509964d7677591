"""Every error that a caller may sensibly catch.

    JaxllmError
    ├── InvalidRequestError (ValueError)    a prompt or a sampling parameter breaks a rule
    ├── ConfigError (ValueError)            an engine argument or an environment variable breaks a rule
    ├── ModelLoadError                      a model can't be found, read or understood
    │   ├── ModelNotFoundError              nothing by that name, here or where we may fetch it
    │   └── UnsupportedModelError           a readable model of a family that we don't run
    ├── DeviceError                         a device can't be used: absent, held by another process, out of memory
    ├── RequestFailedError                  the engine failed at this one request; the others go on
    └── EngineDeadError                     the engine stopped; no request can be answered any more

Messages are one line: the rule, what came, and the way out.

A server's exit code says which of them ended it:

| code | meaning |
|---|---|
| 0 | asked to stop, and everything drained |
| 2 | usage: ConfigError, or a port that can't be had |
| 3 | DeviceError |
| 4 | ModelLoadError and its kinds |
| 5 | EngineDeadError, and whatever has no line here |
"""

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_DEVICE = 3
EXIT_MODEL_LOAD = 4
EXIT_ENGINE_DIED = 5


class JaxllmError(Exception):
    """Base of every error of ours."""


class InvalidRequestError(JaxllmError, ValueError):
    """A request breaks a rule.

    Attributes:
      param: The field, or None when no single field is at fault.
      code: What kind of mistake it is, for programs, where it has a name: "context_length_exceeded".
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(JaxllmError, ValueError):
    """An engine argument or an environment variable breaks a rule."""


class ModelLoadError(JaxllmError):
    """A model file is damaged, incomplete or not what its name says."""


class ModelNotFoundError(ModelLoadError):
    """No model by that name is here, and none could be fetched."""


class UnsupportedModelError(ModelLoadError):
    """The model is readable, but no family file of ours runs it."""


class DeviceError(JaxllmError):
    """A device is absent, held by another process, or out of memory."""


class RequestFailedError(JaxllmError):
    """The engine failed at this request and gave it up; the others go on."""


class EngineDeadError(JaxllmError):
    """The engine stopped after an error that was not one request's fault."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a server that `error` ended, by the table above."""
    for kind, code in _EXIT_CODES.items():
        if isinstance(error, kind):
            return code
    return EXIT_ENGINE_DIED


def from_name(name: str, message: str) -> JaxllmError:
    """Returns the error that another process named by its class; an EngineDeadError if we have no such class."""
    return _BY_NAME.get(name, EngineDeadError)(message)


_EXIT_CODES: dict[type[JaxllmError], int] = {
    ConfigError: EXIT_USAGE,
    InvalidRequestError: EXIT_USAGE,
    DeviceError: EXIT_DEVICE,
    ModelLoadError: EXIT_MODEL_LOAD,
}
_BY_NAME: dict[str, type[JaxllmError]] = {
    kind.__name__: kind
    for kind in (ConfigError, ModelLoadError, ModelNotFoundError, UnsupportedModelError, DeviceError)
}
