"""LightExecutor: a device whose step takes a millisecond and checks nothing, to measure what stands around it.

python -m tests.fakes.fake_server tests.fakes.light_executor:LightExecutor --port 8000
python -m jaxllm.bench serve --max-concurrency 32 --num-prompts 200
"""

import time

from jaxllm.config import EngineConfig
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SampledToken, SchedulerOutput
from tests.fakes.local_executor import LocalExecutor

STEP_S = 0.001


class LightExecutor(LocalExecutor):
    """Every sequence writes the letter a."""

    def __init__(self, config: EngineConfig) -> None:
        scheduler = config.scheduler
        self._info = KVCacheInfo(8193, 16, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._missing: dict[int, int] = {}  # seq_id -> tokens that aren't computed yet

    def initialize(self) -> KVCacheInfo:
        return self._info

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        start_s = time.perf_counter()
        for seq_id in scheduler_output.dropped_seq_ids:
            self._missing.pop(seq_id, None)
        for new in scheduler_output.new_seqs:
            self._missing[new.seq_id] = len(new.token_ids) - new.num_computed_tokens
        cached = scheduler_output.cached_seqs
        for seq_id, token_ids in zip(cached.seq_ids, cached.new_token_ids, strict=True):
            self._missing[seq_id] += len(token_ids)
        sampled = {}
        for seq_id, count in scheduler_output.num_scheduled_tokens.items():
            self._missing[seq_id] -= count
            if not self._missing[seq_id]:
                sampled[seq_id] = [SampledToken(ord("a"))] * scheduler_output.num_samples.get(seq_id, 1)
        time.sleep(max(0.0, STEP_S - (time.perf_counter() - start_s)))
        return ModelRunnerOutput(sampled, {})

    def shutdown(self) -> None:
        pass
