"""CompileCounter: how often XLA has compiled since it was made. After warm-up it should stay 0; each is a stall."""

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts from its making on. JAX keeps a listener for good, so it holds nothing but its number."""

    def __init__(self) -> None:
        self.num_compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._take)

    def _take(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.num_compiles += 1
