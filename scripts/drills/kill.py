"""kill -9 in both directions, and of a worker; the core and a worker are frozen as well; again and again.

The promises: 2 s until every stream has its error, 5 s until nothing is left, 15 s until a frozen core is told of.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.exceptions import EngineDeadError
from jaxllm.sampling_params import SamplingParams
from scripts.drills import server_faults, worker_faults
from tests.fakes.fake_cores import fake_config, fake_front_end

_NUM_STREAMS = 32
_STREAM_DEATH_S = 2.0
_ORPHAN_DEATH_S = 5.0
_FREEZE_TOLD_S = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill_drill", description=__doc__)
    parser.add_argument("times", nargs="?", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(_serve())
        return 0
    rng = random.Random(args.seed)
    drills = {
        "kill -9 of the core": _kill_core,
        "SIGSTOP of the core": _freeze_core,
        "kill -9 of the front end": _kill_front_end,
        "kill -9 of a server's core": server_faults.kill_core,
        "kill -9 of a server": server_faults.kill_server,
        "kill -9 of a worker": worker_faults.kill_worker,
        "SIGSTOP of a worker": worker_faults.freeze_worker,
    }
    for name, drill in drills.items():
        times_s = [drill(rng) for _ in range(args.times)]
        print(f"{name}: {len(times_s)} of {args.times}, at most {max(times_s):.2f} s", flush=True)
    return 0


def _kill_core(rng: random.Random) -> float:
    """Returns the seconds until every stream had its error."""

    async def drill() -> float:
        engine = AsyncLLMEngine(lambda: fake_front_end(fake_config(max_model_len=4096)))
        await engine.wait_ready()
        tasks = [asyncio.create_task(_read(engine, index)) for index in range(_NUM_STREAMS)]
        await asyncio.sleep(rng.random())
        (core,) = psutil.Process().children()
        os.kill(core.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        elapsed_s = time.monotonic() - killed_s
        assert all(isinstance(result, EngineDeadError) for result in results), results
        assert engine.status().phase == "dead"
        assert elapsed_s < _STREAM_DEATH_S, elapsed_s
        await engine.shutdown()
        return elapsed_s

    with _watched_folder() as folder:
        elapsed_s = asyncio.run(drill())
        assert not list(Path(folder).iterdir()) and not psutil.Process().children()
    return elapsed_s


def _freeze_core(rng: random.Random) -> float:
    """Returns the seconds until the engine was said to stand still. Then the core goes on, and so must the streams."""

    async def drill() -> float:
        engine = AsyncLLMEngine(lambda: fake_front_end(fake_config(max_model_len=4096)))
        await engine.wait_ready()
        tasks = [asyncio.create_task(_read(engine, index, max_tokens=1000)) for index in range(_NUM_STREAMS)]
        await asyncio.sleep(rng.random() / 2)
        assert engine.status().phase == "ready"
        (core,) = psutil.Process().children()
        core.suspend()
        frozen_s = time.monotonic()
        while engine.status().phase != "stalled":
            assert time.monotonic() < frozen_s + _FREEZE_TOLD_S
            await asyncio.sleep(0.01)
        elapsed_s = time.monotonic() - frozen_s
        core.resume()
        await asyncio.gather(*tasks)
        while engine.status().phase != "ready":  # its next pulse tells
            await asyncio.sleep(0.01)
        await engine.shutdown()
        return elapsed_s

    return asyncio.run(drill())


def _kill_front_end(rng: random.Random) -> float:
    """Returns the seconds until the core had gone, and its sockets."""
    with _watched_folder() as folder:
        shm = set(os.listdir("/dev/shm"))
        command = [sys.executable, "-m", "scripts.drills.kill", "--serve"]
        front_end = subprocess.Popen(command, env={**os.environ, "TMPDIR": folder})
        deadline_s = time.monotonic() + rng.random() * 3  # from before the core starts to streams in full flow
        while time.monotonic() < deadline_s:
            time.sleep(0.01)
        children = psutil.Process(front_end.pid).children(recursive=True)
        front_end.kill()
        front_end.wait()
        killed_s = time.monotonic()
        while any(child.is_running() for child in children) or list(Path(folder).iterdir()):
            assert time.monotonic() < killed_s + _ORPHAN_DEATH_S, (children, list(Path(folder).iterdir()))
            time.sleep(0.01)
        assert set(os.listdir("/dev/shm")) == shm
        return time.monotonic() - killed_s


@contextmanager
def _watched_folder() -> Iterator[str]:
    """Lets sockets be made in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="kill-drill-") as folder:
        tempfile.tempdir = folder
        yield folder
        tempfile.tempdir = None


async def _serve() -> None:
    engine = AsyncLLMEngine(lambda: fake_front_end(fake_config(max_model_len=4096)))
    await asyncio.gather(*[_read(engine, index) for index in range(_NUM_STREAMS)])


async def _read(engine: AsyncLLMEngine, index: int, max_tokens: int = 4000) -> None:
    async for _ in engine.generate("abc", SamplingParams(temperature=0, max_tokens=max_tokens), f"r{index}"):
        pass


if __name__ == "__main__":
    sys.exit(main())
