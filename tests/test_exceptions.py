"""The table of exit codes, and errors that come from another process by their name."""

import pytest

from jaxllm import exceptions
from jaxllm.exceptions import (
    ConfigError,
    DeviceError,
    EngineDeadError,
    InvalidRequestError,
    JaxllmError,
    ModelLoadError,
    ModelNotFoundError,
    RequestFailedError,
    UnsupportedModelError,
    exit_code,
    from_name,
)

EXIT_CODES = {
    ConfigError: 2,
    InvalidRequestError: 2,
    DeviceError: 3,
    ModelLoadError: 4,
    ModelNotFoundError: 4,
    UnsupportedModelError: 4,
    EngineDeadError: 5,
    RequestFailedError: 5,
    KeyError: 5,
}


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_f38_every_error_has_its_exit_code(kind: type[Exception]) -> None:
    assert exit_code(kind("x")) == EXIT_CODES[kind]


def test_no_error_is_left_out() -> None:
    kinds = {kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, JaxllmError)}
    assert kinds == {kind for kind in EXIT_CODES if issubclass(kind, JaxllmError)} | {JaxllmError}


@pytest.mark.parametrize("kind", [ConfigError, DeviceError, ModelLoadError, ModelNotFoundError, UnsupportedModelError])
def test_what_can_stop_an_engine_from_starting_comes_back_by_name(kind: type[JaxllmError]) -> None:
    error = from_name(kind.__name__, "why")
    assert type(error) is kind and str(error) == "why"


@pytest.mark.parametrize("name", ["EngineDeadError", "KeyError", "SystemExit", ""])
def test_any_other_name_is_the_engines_death(name: str) -> None:
    assert type(from_name(name, "why")) is EngineDeadError
