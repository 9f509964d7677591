"""The public names are these, each can be had, and the command table leads somewhere."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

import jaxllm
from jaxllm import __main__


def test_public_names_are_pinned() -> None:
    assert sorted(jaxllm.__all__) == [
        "AsyncLLMEngine",
        "CompletionOutput",
        "EngineArgs",
        "LLM",
        "LLMEngine",
        "RequestOutput",
        "SamplingParams",
        "__version__",
    ]
    assert dir(jaxllm) == sorted(jaxllm.__all__)


@pytest.mark.parametrize("name", sorted(set(jaxllm.__all__) - {"__version__"}))
def test_each_name_is_the_class_of_that_name(name: str) -> None:
    assert vars(importlib.import_module(jaxllm._MODULES[name]))[name] is jaxllm.__getattr__(name)


def test_the_version_is_the_distributions() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert jaxllm.__version__ == project["version"]


def test_other_names_are_missing() -> None:
    with pytest.raises(AttributeError, match="module 'jaxllm' has no attribute 'Llm'"):
        jaxllm.Llm  # noqa: B018


@pytest.mark.parametrize("module", sorted(__main__._COMMANDS.values()))
def test_each_command_has_a_module(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        ([], 2, "usage: jaxllm COMMAND", ""),
        (["--help"], 0, "commands: generate, serve, bench, convert, plan, models", ""),
        (["--version"], 0, f"jaxllm {jaxllm.__version__}\n", ""),
        (["genrate"], 2, "", "error: unknown command genrate; did you mean generate?\n"),
        (["zzz"], 2, "", "error: unknown command zzz; commands: generate, serve, bench, convert, plan, models\n"),
    ],
)
def test_the_console_script(argv: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(argv) == code
    captured = capsys.readouterr()
    assert out in captured.out and captured.err == err


def test_the_console_script_hands_the_rest_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["generate", "--temperature", "-1", "a"]) == 2
    assert capsys.readouterr().err == "error: temperature must be at least 0, got -1.0\n"
