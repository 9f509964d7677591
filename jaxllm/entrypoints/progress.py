"""A bar on stderr: how many prompts are done, and the token rates. Knows outputs, not engines."""

import time
from collections.abc import Sequence
from types import TracebackType

from tqdm.auto import tqdm

from jaxllm.outputs import RequestOutput


class ProgressBar:
    """Counts finished requests. A context manager.

    Args:
      num_prompts: How many requests make it full.
      disable: True shows nothing; None shows nothing unless stderr is a terminal.
    """

    def __init__(self, num_prompts: int, disable: bool | None = False) -> None:
        self._bar = tqdm(total=num_prompts, desc="Processed prompts", unit="prompt", disable=disable)
        self._start_s = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    def update(self, outputs: Sequence[RequestOutput]) -> None:
        finished = [output for output in outputs if output.finished]
        if not finished:
            return
        for output in finished:
            self._num_prompt_tokens += len(output.prompt_token_ids)
            self._num_generated_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_prompt_tokens / elapsed_s:.1f} tok/s, "
            f"output: {self._num_generated_tokens / elapsed_s:.1f} tok/s",
            refresh=False,
        )
        self._bar.update(len(finished))

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
