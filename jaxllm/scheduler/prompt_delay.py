"""PromptDelay: holds new prompts back for a while, so that more of them share a step. Knows no queue."""


class PromptDelay:
    """scheduler_delay_factor: the oldest waiting request must have waited this many times the last prompt step.

    Attributes:
      prev_time_s: When the last step was scheduled.
      prev_prompt: Whether that step took in a prompt.
      last_prompt_latency_s: From the last step that took in a prompt to the step after it.
    """

    def __init__(self, delay_factor: float) -> None:
        self._delay_factor = delay_factor
        self.prev_time_s = 0.0
        self.prev_prompt = False
        self.last_prompt_latency_s = 0.0

    def passed(self, now_s: float, arrival_times_s: list[float], is_running: bool) -> bool:
        """Returns whether this step may take in prompts. Call it once a step.

        Args:
          now_s: This step's time.
          arrival_times_s: Of the waiting requests.
          is_running: Whether anything runs; otherwise nobody would gain from waiting.
        """
        if self.prev_prompt:
            self.last_prompt_latency_s = now_s - self.prev_time_s
        self.prev_time_s, self.prev_prompt = now_s, False
        if not self._delay_factor or not arrival_times_s or not is_running:
            return True
        return now_s - min(arrival_times_s) > self._delay_factor * self.last_prompt_latency_s
