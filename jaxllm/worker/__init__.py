"""One mesh slice: weights, KV cache, compiled programs. Knows SchedulerOutput, not the scheduler."""
