"""Compiling every program before the first request, in parallel, through JAX's compilation cache on disk."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from time import perf_counter

import jax

from jaxllm import envs
from jaxllm.exceptions import ConfigError
from jaxllm.logger import get_logger
from jaxllm.progress import progress_bar
from jaxllm.worker.memory_profile import ProgramMemory, activation_bytes
from jaxllm.worker.programs import CompiledPrograms, Program

_logger = get_logger(__name__)


def enable_compile_cache() -> None:
    """Keeps compiled programs under JAXLLM_HOME, unless JAX was already given a folder or it is turned off.

    Only our own folder, closed to others, is used: loading a cached program runs what stands in it.
    """
    if not envs.is_compile_cache_on() or jax.config.values.get("jax_compilation_cache_dir") is not None:
        return
    folder = envs.home() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _logger.warning("compiled programs won't be kept: can't make %s (%s)", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_programs(programs: Sequence[Program]) -> CompiledPrograms:
    """Compiles every program, several at a time."""
    start = perf_counter()
    compiled = {}
    with (
        ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 16)) as pool,
        progress_bar(len(programs), "compiling", "program") as bar,
    ):
        futures = {pool.submit(program.compile): program for program in programs}
        for future in as_completed(futures):
            program = futures[future]
            compiled[program.name, program.size] = future.result()
            bar.set_postfix_str(f"{program.name}[{program.size}]")
            bar.update(1)
    _logger.info("%d programs ready in %.1f s", len(programs), perf_counter() - start)
    return CompiledPrograms(compiled)


def measure_activations(programs: Sequence[Program]) -> int:
    """Compiles one step's programs and returns the bytes that they need besides weights and KV cache.

    Raises:
      ConfigError: The compiler doesn't report them.
    """
    memory = {(program.name, program.size): _program_memory(program) for program in programs}
    for (name, size), need in memory.items():
        _logger.info("%s[%d]: %d bytes of temporaries, %d of results", name, size, need.temp_bytes, need.result_bytes)
    return activation_bytes(list(memory.values()))


def _program_memory(program: Program) -> ProgramMemory:
    analysis = program.compile().memory_analysis()
    if analysis is None:
        raise ConfigError("this platform's compiler doesn't say how much memory a step needs; set --kv-cache-memory")
    return ProgramMemory(
        int(analysis.temp_size_in_bytes), int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    )
