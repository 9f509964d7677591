"""The manifests and the guide: readable YAML, and no flag that our commands don't have."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm import generate, serve
from jaxllm.entrypoints.openai.gate import PROBES
from jaxllm.executor.external_launcher import LauncherEnvironment

ROOT = Path(__file__).parents[1]
MANIFESTS = sorted((ROOT / "manifests").glob("*.yaml"))
_PARSERS = {"jaxllm.serve": serve._make_parser, "jaxllm.generate": generate._make_parser}
_COMMAND = re.compile(r"python -m (jaxllm\.\w+)((?:[^\n|>#`\\]|\\\n)*)")


def _find(tree: Any, key: str) -> Iterator[Any]:
    """Yields every value of `key`, wherever it stands."""
    if isinstance(tree, dict):
        yield from (value for name, value in tree.items() if name == key)
        for value in tree.values():
            yield from _find(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from _find(value, key)


def _commands(text: str) -> list[tuple[str, list[str]]]:
    """Returns the modules that a text runs, with their arguments."""
    return [(module, shlex.split(arguments.replace("\\\n", " "))) for module, arguments in _COMMAND.findall(text)]


def _commands_of(document: Any) -> list[tuple[str, list[str]]]:
    found = []
    for containers in _find(document, "containers"):
        for container in containers:
            command = [*container.get("command", []), *container.get("args", [])]
            joined = command[-1] if command[:2] == ["bash", "-c"] else " ".join(command)
            found += _commands(joined)
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_runs_commands_that_exist(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert all({"apiVersion", "kind", "metadata"} <= set(document) for document in documents)
    commands = [command for document in documents for command in _commands_of(document)]
    assert len(commands) == 1
    for module, arguments in commands:
        args = vars(_PARSERS[module]().parse(arguments))  # ends the process if it has no such flag
        assert args["model"].startswith("/models/")
    for probe in _find(documents, "httpGet"):
        assert probe["path"] in PROBES and probe["port"] == 8000


def test_servers_get_the_time_they_need_to_drain() -> None:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for module, arguments in _commands_of(document):
                if module == "jaxllm.serve":
                    args = vars(serve._make_parser().parse(arguments))
                    assert max(_find(document, "terminationGracePeriodSeconds")) > args["shutdown_timeout"]


def test_the_launchers_variables_are_those_that_we_read() -> None:
    text = (ROOT / "manifests" / "external_launcher_job.yaml").read_text(encoding="utf-8")
    script = next(_find(yaml.safe_load(text.split("---")[0]), "args"))[0]
    exported = dict(word.split("=", 1) for word in shlex.split(script) if re.match(r"[A-Z_]+=", word))
    assert LauncherEnvironment.read({**exported, "RANK": "1"}) == LauncherEnvironment(
        1, 2, 0, "jaxllm-batch-0.jaxllm-batch:29500"
    )


def test_the_guide_names_flags_and_manifests_that_exist() -> None:
    guide = (ROOT / "docs" / "multi_host.md").read_text(encoding="utf-8")
    commands = _commands(guide)
    assert len(commands) == 4
    for module, arguments in commands:
        if module in _PARSERS:
            _PARSERS[module]().parse(arguments)
    assert {f"../manifests/{path.name}" for path in MANIFESTS} == set(re.findall(r"\((\.\./manifests/[^)]+)\)", guide))


def test_a_flag_that_does_not_exist_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    ((module, arguments),) = _commands("exec python -m jaxllm.serve --no-such-flag=3 \\\n  --port=1")
    assert (module, arguments) == ("jaxllm.serve", ["--no-such-flag=3", "--port=1"])
    with pytest.raises(SystemExit):
        _PARSERS[module]().parse(arguments)
    assert "--no-such-flag" in capsys.readouterr().err
