"""Every error that a caller may sensibly catch.

    JaxllmError
    ├── InvalidRequestError (ValueError)    a prompt or a sampling parameter breaks a rule
    ├── ConfigError (ValueError)            an engine argument or an environment variable breaks a rule
    ├── ModelLoadError                      a model can't be found, read or understood
    │   ├── ModelNotFoundError              nothing by that name, here or where we may fetch it
    │   └── UnsupportedModelError           a readable model of a family that we don't run
    └── EngineDeadError                     the engine stopped; no request can be answered any more

Messages are one line: the rule, what came, and the way out.
"""


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


class EngineDeadError(JaxllmError):
    """The engine stopped after an error that was not one request's fault."""
