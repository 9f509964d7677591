"""Scheduling policies: in which order requests are served. Know neither queues nor blocks."""

from jaxllm.messages import EngineCoreRequest

QueueKey = tuple[int, float, int]


def queue_key(policy: str, request: EngineCoreRequest, number: int) -> QueueKey:
    """Returns where a request stands in every queue: the lowest key is served first and preempted last.

    Args:
      policy: "fcfs": as the requests came. "priority": the lower number first, then the earlier arrival.
      request: The request.
      number: Counts requests as they come; ends every tie.
    """
    if policy == "priority":
        return (request.priority, request.arrival_time_s, number)
    return (0, 0.0, number)
