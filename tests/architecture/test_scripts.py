"""The scripts: runnable, strict, and listed in their README."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ROOT / ".ci" / "run",
    ROOT / "scripts" / "peers" / "install_vllm",
    *sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix),
]


def test_the_readme_lists_every_script() -> None:
    readme = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1].split()[0] for line in readme.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(path.name for path in SCRIPTS if path.parent.name == "scripts")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_executable_and_strict(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
