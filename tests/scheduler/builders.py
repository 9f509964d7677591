"""Builders of scheduler objects, one line each, and the loop that an engine runs."""

from typing import Any

from jaxllm.config import CacheConfig, SchedulerConfig
from jaxllm.messages import EngineCoreOutput, EngineCoreRequest, KVCacheInfo, SchedulerOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.sequence import Sequence
from tests.fakes.fake_executor import FakeExecutor

EOS = 2


def make_request(
    request_id: str,
    prompt_token_ids: list[int],
    max_tokens: int = 4,
    cache_salt: str | None = None,
    priority: int = 0,
    arrival_time_s: float = 0.0,
    **params: Any,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=[EOS],
        arrival_time_s=arrival_time_s,
        seed=100,
        max_tokens=max_tokens,
        cache_salt=cache_salt,
        priority=priority,
    )


def make_seq(seq_id: int, token_ids: list[int], block_size: int = 4) -> Sequence:
    return Sequence(seq_id, f"request-{seq_id}", 0, token_ids, block_size)


def make_scheduler(
    executor: FakeExecutor, max_model_len: int = 64, enable_prefix_caching: bool = True, **policies: Any
) -> Scheduler:
    info: KVCacheInfo = executor.initialize()
    config = SchedulerConfig(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=max_model_len,
        **policies,
    )
    return Scheduler(config, CacheConfig(enable_prefix_caching=enable_prefix_caching), info)


def run_step(scheduler: Scheduler, executor: FakeExecutor) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Runs one step and checks the ledger after each half of it."""
    step = scheduler.schedule(0.0)
    scheduler.check_integrity()
    outputs = scheduler.update_from_output(step, executor.execute_model(step)).outputs
    scheduler.check_integrity()
    return step, outputs


def run_all(scheduler: Scheduler, executor: FakeExecutor) -> dict[tuple[str, int], list[int]]:
    """Runs to the end and returns (request_id, index) -> generated tokens."""
    tokens: dict[tuple[str, int], list[int]] = {}
    while scheduler.has_unfinished_requests():
        for output in run_step(scheduler, executor)[1]:
            for seq in output.sequences:
                key = (output.request_id, seq.index)
                tokens.setdefault(key, []).extend(token.token_id for token in seq.new_tokens)
    return tokens


def table(scheduler: Scheduler, seq_id: int) -> list[int]:
    return scheduler.kv_cache_manager.block_ids(seq_id)


def free_ids(scheduler: Scheduler) -> list[int]:
    return [block.block_id for block in scheduler.kv_cache_manager.block_pool.free_block_queue]


def beam_params(**params: Any) -> dict[str, Any]:
    """Sampling parameters of a beam search."""
    return {"use_beam_search": True, "temperature": 0.0, **params}
