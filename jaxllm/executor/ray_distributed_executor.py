"""RayDistributedExecutor: one actor a host of a Ray cluster, which together form one jax.distributed job.

Messages are the same bytes as between processes of one machine; Ray carries them. Ray itself pickles what it sends to
its own processes, so a cluster belongs on a network whose hosts trust each other. The only file that imports Ray.
"""

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from jaxllm.config import EngineConfig
from jaxllm.engine.serialization import MessageDecoder, MessageEncoder
from jaxllm.exceptions import EngineDeadError, from_name
from jaxllm.executor.executor import WORKER_CLASS, Executor, FailureCallback
from jaxllm.executor.failure_notice import FailureNotice
from jaxllm.executor.ranks import alone, output_rank, same_everywhere
from jaxllm.executor.ray_placement import Placement, place_workers
from jaxllm.executor.ray_worker import RayWorker
from jaxllm.executor.rpc_messages import StartWorker
from jaxllm.executor.worker_wrapper import Failure
from jaxllm.messages import KVCacheInfo, ModelRunnerOutput, SchedulerOutput

_PLACEMENT_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 600.0
_LOAD_TIMEOUT_S = 7200.0
_STEP_TIMEOUT_S = 600.0
_SHUTDOWN_TIMEOUT_S = 15.0
_LOOK_S = 0.6
_MAX_SILENT_LOOKS = 4
# A native call may hold up an actor's threads while it loads and compiles; its processor time can't be seen from here.
_MAX_SILENT_LOOKS_LOADING = 100


class RayDistributedExecutor(Executor):
    """Starts its actors in initialize(), and ends all of them when one fails.

    Args:
      config: Of the engine.
      worker_class: "module:class" of the worker.
      forms_job: Whether the workers form a jax.distributed job. Those that don't use JAX need none.
    """

    def __init__(self, config: EngineConfig, worker_class: str = WORKER_CLASS, forms_job: bool = True) -> None:
        self._config = config
        self._worker_class = worker_class
        self._forms_job = forms_job
        self._notice = FailureNotice()
        self._encoder = MessageEncoder()
        self._actors: list[Any] = []  # by rank
        self._homes: list[tuple[str, int]] = []  # each actor's node and process id
        # Replies that nobody has waited for -> rank, and whether of a step.
        self._unanswered: dict[Any, tuple[int, bool]] = {}
        self._group: Any = None
        self._output_rank = 0
        self._failure: str | None = None
        self._is_loaded = False
        self._is_shut_down = threading.Event()
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()  # one call at a time

    def initialize(self) -> KVCacheInfo:
        _connect()
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            placement = place_workers(self._config.parallel, nodes)
            self._start_actors(placement)
            info = same_everywhere(self.collective_rpc("initialize", (), KVCacheInfo, _LOAD_TIMEOUT_S))
            self._is_loaded = True
            return info
        except TimeoutError as error:
            self.shutdown()
            raise EngineDeadError(f"the Ray workers don't start: {error}") from error
        except BaseException:  # Ctrl-C too
            self.shutdown()
            raise

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        awaited = (self._output_rank,)
        try:
            values = self._call("execute_model", (scheduler_output,), ModelRunnerOutput, _STEP_TIMEOUT_S, awaited)
        except TimeoutError as error:
            raise EngineDeadError(str(error)) from error
        result = values[0]
        assert isinstance(result, ModelRunnerOutput)
        return result

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), returns: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        return self._call(method, args, returns, timeout_s, range(len(self._actors)))

    def check_health(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        if not self._actors:
            raise EngineDeadError("the workers aren't running: they were never initialized, or were shut down")

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._notice.register(callback)

    def shutdown(self) -> None:
        if self._is_shut_down.is_set():
            return
        self._is_shut_down.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._actors and self._failure is None:
            refs = [_in_turn(actor.call).remote("shutdown", self._encode(())) for actor in self._actors]
            ray.wait(refs, num_returns=len(refs), timeout=_SHUTDOWN_TIMEOUT_S)
        self._kill_actors()
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()  # ends the cluster too, if it is ours

    def _start_actors(self, placement: Placement) -> None:
        count, devices = placement.num_workers, float(placement.num_local_devices)
        strategy = "STRICT_SPREAD" if placement.is_spread else "PACK"
        self._group = placement_group([{placement.resource: devices}] * count, strategy=strategy)
        if not self._group.wait(_PLACEMENT_TIMEOUT_S):
            raise TimeoutError(f"no {count} x {devices:g} {placement.resource} within {_PLACEMENT_TIMEOUT_S:g} s")
        needs: dict[str, Any] = {"resources": {placement.resource: devices}}
        if placement.resource in ("CPU", "GPU"):
            needs = {f"num_{placement.resource.lower()}s": devices}
        actor_class = ray.remote(concurrency_groups={"calls": 1, "health": 1})(RayWorker)
        actors = [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index), **needs
            ).remote()
            for index in range(count)
        ]
        self._actors = actors
        places = ray.get([actor.whereabouts.remote() for actor in actors], timeout=_START_TIMEOUT_S)
        order = sorted(range(count), key=lambda index: (places[index].tpu_worker_id, index))
        self._actors = [actors[index] for index in order]
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        self._homes = [(nodes[index], places[index].pid) for index in order]
        ray.get([actor.be_rank.remote(rank, count) for rank, actor in enumerate(self._actors)])
        self._watcher = threading.Thread(target=self._watch, name="ray-watcher", daemon=True)
        self._watcher.start()
        self._output_rank = output_rank(self._config.parallel, count)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        coordinator = f"{addresses[self._homes[0][0]]}:{places[order[0]].free_port}"
        start = StartWorker(
            alone(self._config),
            self._worker_class,
            coordinator if self._forms_job else None,
            placement.num_local_devices,
        )
        self.collective_rpc("init_worker", (start,), timeout_s=_START_TIMEOUT_S)

    def _call(
        self, method: str, args: tuple[Any, ...], returns: Any, timeout_s: float | None, awaited: Sequence[int]
    ) -> list[Any]:
        """Has every worker run a method; returns the values of those that are waited for."""
        with self._lock:
            self.check_health()
            frames = self._encode(args)
            refs = {_in_turn(actor.call).remote(method, frames): rank for rank, actor in enumerate(self._actors)}
            self._unanswered |= {ref: (rank, method == "execute_model") for ref, rank in refs.items()}
            deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
            values: dict[int, Any] = {}
            while len(values) < len(awaited):
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise TimeoutError(f"the workers haven't answered {method} within {timeout_s:g} s")
                for ref in ray.wait(list(self._unanswered), timeout=_LOOK_S)[0]:
                    rank, is_of_step = self._unanswered.pop(ref)
                    result = self._reply(rank, ref)
                    if isinstance(result, Failure):
                        # A worker that failed at a step isn't where the others are, even if nobody waited for it.
                        if ref in refs or is_of_step:
                            raise from_name(result.error, result.message)
                    elif ref in refs and rank in awaited:
                        values[rank] = _decoder(returns).decode(result)
                self.check_health()
            return [values[rank] for rank in sorted(values)]

    def _reply(self, rank: int, ref: Any) -> list[bytes] | Failure:
        try:
            result: list[bytes] | Failure = ray.get(ref)
            return result
        except ray.exceptions.RayError as error:
            self._fail(_death(rank, error))
            raise EngineDeadError(self._failure or _death(rank, error)) from error

    def _encode(self, args: tuple[Any, ...]) -> list[bytes]:
        return [bytes(frame) for frame in self._encoder.encode(args)]

    def _watch(self) -> None:
        """Asks every actor for a sign of life again and again, until one gives none or shutdown()."""
        silent = 0
        refs = self._ping()
        while not self._is_shut_down.wait(_LOOK_S if not silent else 0) and self._failure is None:
            ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=_LOOK_S)
            for ref in ready:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    return self._fail(_death(refs[ref], error))
            silent = silent + 1 if late else 0
            limit = _MAX_SILENT_LOOKS if self._is_loaded else _MAX_SILENT_LOOKS_LOADING
            if silent >= limit:
                return self._fail(f"worker {refs[late[0]]} stands still: no sign of life for {silent * _LOOK_S:.1f} s")
            if not late:
                refs = self._ping()
        return None

    def _ping(self) -> dict[Any, int]:
        return {
            actor.ping.options(concurrency_group="health").remote(): rank for rank, actor in enumerate(self._actors)
        }

    def _fail(self, reason: str) -> None:
        if self._failure is None and not self._is_shut_down.is_set():
            self._failure = reason
            self._kill_actors()
            self._notice.tell(reason)

    def _kill_actors(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._failure is None:
            return
        # A frozen process doesn't hear Ray; its node can end it all the same.
        for node_id, pid in self._homes:
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=True)
            ray.remote(num_cpus=0, max_retries=0)(_kill).options(scheduling_strategy=on_node).remote(pid)


def _connect() -> None:
    """Connects to the cluster that RAY_ADDRESS names, or that runs on this machine; else starts one of our own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "local":
            ray.init(address, logging_level=logging.WARNING)
            return
    except ConnectionError as error:
        if address != "auto":
            raise EngineDeadError(f"the Ray cluster at RAY_ADDRESS={address} can't be reached: {error}") from error
    os.environ.pop("RAY_ADDRESS", None)  # Ray takes the variable before the argument
    ray.init("local", include_dashboard=False, logging_level=logging.WARNING)


def _in_turn(method: Any) -> Any:
    """Returns an actor's method so that its calls run in order, one at a time."""
    return method.options(concurrency_group="calls")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _death(rank: int, error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"worker {rank} has ended: {type(error).__name__}: {words:.300}"


@functools.cache
def _decoder(value_type: Any) -> MessageDecoder[Any]:
    return MessageDecoder(value_type)
