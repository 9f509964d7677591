"""Rules of the source that import-linter can't see: where jit may stand, and what may stand nowhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxllm", "pallas_kernels", "sharding")
JIT_HOMES = ("jaxllm/worker/", "jaxllm/model_loader/", "pallas_kernels/")
# Loading any of these can run what a file says, or drags in a second framework.
BANNED_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch"}
BANNED_CALLS = {"eval", "exec"}
JIT_NAMES = {"jit", "pjit", "pmap"}


def jit_lines(tree: ast.AST) -> Iterator[int]:
    """Yields the lines that name jit: `jax.jit`, `nnx.jit`, `from jax import jit`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in JIT_NAMES:
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and JIT_NAMES & {alias.name for alias in node.names}:
            yield node.lineno


def banned_lines(tree: ast.AST) -> Iterator[int]:
    """Yields the lines that import a banned module, call a banned function or allow pickles in np.load."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            if isinstance(node, ast.Call) and _is_banned_call(node):
                yield node.lineno
            continue
        if BANNED_MODULES & {name.split(".")[0] for name in names}:
            yield node.lineno


def _is_banned_call(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return name in BANNED_CALLS or any(keyword.arg == "allow_pickle" for keyword in call.keywords)


def _sources() -> list[str]:
    return [str(path.relative_to(ROOT)) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_all_three_packages_are_looked_at() -> None:
    sources = _sources()
    assert {source.split("/")[0] for source in sources} == set(PACKAGES)
    assert {"jaxllm/messages.py", "sharding/mesh.py"} <= set(sources)


@pytest.mark.parametrize("source", [path for path in _sources() if not path.startswith(JIT_HOMES)])
def test_jit_stands_only_where_programs_are_made(source: str) -> None:
    assert list(jit_lines(ast.parse((ROOT / source).read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize("source", _sources())
def test_nothing_runs_what_a_file_says(source: str) -> None:
    assert list(banned_lines(ast.parse((ROOT / source).read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "line",
    [
        "f = jax.jit(g)",
        "from jax import jit",
        "@nnx.jit\ndef f(): ...",
        "@partial(jax.jit, donate_argnums=0)",
    ],
)
def test_jit_is_found(line: str) -> None:
    source = line + "\ndef f(): ..." if line.startswith("@") else line
    assert list(jit_lines(ast.parse(source))) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, marshal",
        "from torch.nn import functional",
        "eval('1')",
        "exec(code)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_banned_things_are_found(line: str) -> None:
    assert list(banned_lines(ast.parse(line))) == [1]


@pytest.mark.parametrize("line", ["model.eval()", "re.compile('a')", "from jaxllm import envs", "np.load(path)"])
def test_harmless_things_are_not(line: str) -> None:
    assert list(banned_lines(ast.parse(line))) == []
