"""A process that owns an engine's process, and forks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FORKS = """
import os, signal
from jaxllm.engine.llm_engine import LLMEngine, make_client
from tests.engine.test_core_process import texts
from tests.fakes.fake_cores import fake_front_end

config, tokenizer, eos_token_ids = fake_front_end()
engine = LLMEngine(config, tokenizer, make_client(config, "mp"), eos_token_ids)
with engine._client._link._send_lock:  # another thread sends something at this moment; in the fork it never ends
    pid = os.fork()
    if not pid:
        signal.alarm(120)
        engine.shutdown()
        os._exit(0)
print(os.waitpid(pid, 0)[1], texts(engine, ["a"]))
engine.shutdown()
"""


def test_a_fork_that_ends_leaves_the_core_alone(tmp_path: Path) -> None:
    # In a process of its own: here other tests have started JAX, whose threads a fork doesn't survive.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", _FORKS]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("0 ['bcdef']\n", 0), done.stderr
