"""vllm.grpc.engine.VllmEngine: what an inference gateway needs to route to us. Token ids go in and out.

Not here, and answered UNIMPLEMENTED: embeddings, profiles, KV cache events (gateways poll GetLoads instead).
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import grpc

import jaxllm
from jaxllm.entrypoints.grpc_server import descriptors, vllm_convert
from jaxllm.entrypoints.grpc_server.deltas import Deltas
from jaxllm.entrypoints.grpc_server.engine_door import EngineDoor, new_request_id
from jaxllm.entrypoints.grpc_server.errors import Refusal
from jaxllm.entrypoints.grpc_server.rpc import Method
from jaxllm.entrypoints.grpc_server.tokenizer_archive import build_archive
from jaxllm.messages import KVCacheInfo, SchedulerStats

_CHUNK_BYTES = 64 << 10
_message_class = descriptors.message_class
_HealthCheckResponse = _message_class("vllm.grpc.engine.HealthCheckResponse")
_AbortResponse = _message_class("vllm.grpc.engine.AbortResponse")
_GetModelInfoResponse = _message_class("vllm.grpc.engine.GetModelInfoResponse")
_GetServerInfoResponse = _message_class("vllm.grpc.engine.GetServerInfoResponse")
_GetLoadsResponse = _message_class("vllm.grpc.engine.GetLoadsResponse")
_SchedulerLoad = _message_class("vllm.grpc.engine.SchedulerLoad")
_FlushCacheResponse = _message_class("smg.grpc.common.FlushCacheResponse")
_GetTokenizerChunk = _message_class("smg.grpc.common.GetTokenizerChunk")


class VllmEngineService:
    """The methods of vllm.grpc.engine.VllmEngine on one engine."""

    def __init__(self, door: EngineDoor) -> None:
        self._door = door
        self._archive: bytes | None = None

    @property
    def methods(self) -> dict[str, Method]:
        return {
            "Generate": self.generate,
            "HealthCheck": self.health_check,
            "FlushCache": self.flush_cache,
            "Abort": self.abort,
            "GetModelInfo": self.get_model_info,
            "GetServerInfo": self.get_server_info,
            "GetLoads": self.get_loads,
            "GetTokenizer": self.get_tokenizer,
        }

    async def generate(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        self._door.check_ready()
        params = vllm_convert.to_sampling_params(request.sampling_params)
        prompt = vllm_convert.to_prompt(request)
        name = new_request_id(request, context)
        deltas = Deltas()
        async with aclosing(self._door.generate(prompt, params, name, final_only=not request.stream)) as outputs:
            async for output in outputs:
                completions = {completion.index: completion for completion in output.outputs}
                for part, is_first in deltas.take(output):
                    if request.stream:
                        yield vllm_convert.to_chunk(output, part, is_first, params)
                    if part.finished:
                        yield vllm_convert.to_complete(output, completions[part.index], params)

    async def health_check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        status = self._door.engine.status()
        return _HealthCheckResponse(healthy=self._door.is_ready, message=status.detail or status.phase)

    async def flush_cache(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._door.check_ready()
        if request.timeout_s > 0:
            await self._door.wait_idle(request.timeout_s)
        is_reset = await self._door.engine.reset_prefix_cache()
        return _FlushCacheResponse(success=is_reset, message="" if is_reset else "requests are running")

    async def abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._door.abort(request.request_ids)
        return _AbortResponse()

    async def get_model_info(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._door.check_ready()
        config, tokenizer = self._door.engine.config, self._door.engine.tokenizer
        return _GetModelInfoResponse(
            model_path=self._door.settings.model,
            is_generation=True,
            max_context_length=config.scheduler.max_model_len,
            vocab_size=config.model.vocab_size,
            served_model_name=self._door.model_name,
            tokenizer_path=self._door.settings.model,
            architectures=[config.model.architecture],
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id,
            max_req_input_len=config.scheduler.max_model_len - 1,
            default_sampling_params_json=json.dumps(self._door.sampling_defaults),
        )

    async def get_server_info(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._door.check_ready()
        config, infos = self._door.engine.config, self._door.engine.kv_cache_infos
        assert infos is not None
        return _GetServerInfoResponse(
            active_requests=self._door.num_requests,
            last_receive_timestamp=self._door.last_output_time,
            uptime_seconds=self._door.uptime_s,
            server_type="jaxllm-grpc",
            data_parallel_size=len(infos),
            kv_cache_dtype=config.dtype,
            block_size=infos[0].block_size,
            model_dtype=config.dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
        )

    async def get_loads(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._door.check_ready()
        engine = self._door.engine
        stats, infos = await engine.get_stats_by_engine(), engine.kv_cache_infos
        assert infos is not None
        max_num_seqs = engine.config.scheduler.max_num_seqs
        loads = [
            _load_of(rank, one, info, max_num_seqs)
            for rank, (one, info) in enumerate(zip(stats, infos, strict=True))
            if not request.HasField("dp_rank") or rank == request.dp_rank
        ]
        return _GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=jaxllm.__version__, dp_rank_count=len(infos), loads=loads
        )

    async def get_tokenizer(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        self._door.check_ready()
        tokenizer = self._door.engine.tokenizer
        if not tokenizer.files():
            kind = type(tokenizer).__name__
            raise Refusal(
                grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"a {kind} has no form in which it can be sent"
            )
        if self._archive is None:
            self._archive = await asyncio.to_thread(build_archive, tokenizer)
        archive = self._archive
        for start in range(0, len(archive), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(archive)
            digest = hashlib.sha256(archive).hexdigest() if is_last else ""
            yield _GetTokenizerChunk(data=archive[start : start + _CHUNK_BYTES], sha256=digest)


def _load_of(rank: int, stats: SchedulerStats, info: KVCacheInfo, max_num_seqs: int) -> Any:
    """Returns one data parallel replica's load."""
    num_blocks = info.num_device_blocks - 1  # block 0 is nobody's
    num_used = num_blocks - stats.num_free_blocks
    return _SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting + stats.num_swapped,
        num_total_reqs=stats.num_running + stats.num_waiting + stats.num_swapped,
        num_used_tokens=num_used * info.block_size,
        max_total_num_tokens=num_blocks * info.block_size,
        token_usage=num_used / num_blocks,
        cache_hit_rate=stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
        max_running_requests=max_num_seqs,
    )
