"""One sequence's text: what has been detokenized, where a stop string cut it, and how much may be shown.

Knows nothing of requests, and of tokens only that a Detokenizer takes them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.engine.detokenizer import Detokenizer


class StopMatch(NamedTuple):
    stop: str
    start: int  # index in the text of the stop string's first character
    end: int  # index after its last one


def find_stop(text: str, num_new_chars: int, stops: Sequence[str]) -> StopMatch | None:
    """Returns the stop string whose last character comes first among the text's new characters.

    Of two that end together, the longer one is returned, so that no part of it stays in the text.

    Example: in "xab|cd" ("cd" is new), of the stops "bc" and "abcd", "bc" ends first, at 4.
    """
    best: StopMatch | None = None
    for stop in stops:
        start = text.find(stop, max(0, len(text) - num_new_chars - len(stop) + 1))
        if start < 0:
            continue
        match = StopMatch(stop, start, start + len(stop))
        if best is None or (match.end, match.start) < (best.end, best.start):
            best = match
    return best


class SequenceText:
    """Grows a text token by token until it is finished or a stop string is complete.

    Args:
      detokenizer: Turns tokens into text.
      stops: The stop strings.
      include_stop_str_in_output: Whether the one that is found stays.
      min_tokens: Stop strings that end within the text of this many tokens are none.
    """

    __slots__ = ("_detokenizer", "_stops", "_keeps_stop", "_num_unsearched", "_num_held_chars", "_text", "_is_finished")

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], include_stop_str_in_output: bool, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._num_unsearched = min_tokens  # tokens still to come whose text isn't searched
        self._stops = stops
        self._keeps_stop = include_stop_str_in_output
        # The beginning of a stop string must not be shown: what has been shown can't be taken back.
        longest = max((len(stop) for stop in stops), default=1)
        self._num_held_chars = 0 if include_stop_str_in_output else longest - 1
        self._text = ""
        self._is_finished = False

    def append(self, token_id: int) -> str | None:
        """Takes the next token. Returns the stop string that it completed, if any: the text ends there."""
        stop = self._extend(self._detokenizer.append(token_id))
        if self._num_unsearched:
            self._num_unsearched -= 1
        return stop

    def finish(self) -> str | None:
        """Takes the end of the sequence: held text is released. Returns a stop string as `append` does."""
        stop = self._extend(self._detokenizer.flush())
        self._is_finished = True
        return stop

    @property
    def visible(self) -> str:
        """The text that is final: while the sequence runs, without what may become a stop string."""
        if self._is_finished or not self._num_held_chars:
            return self._text
        return self._text[: -self._num_held_chars]

    def _extend(self, new_text: str) -> str | None:
        if not new_text:
            return None
        self._text += new_text
        is_searched = self._stops and not self._num_unsearched
        match = find_stop(self._text, len(new_text), self._stops) if is_searched else None
        if match is None:
            return None
        self._text = self._text[: match.end if self._keeps_stop else match.start]
        self._is_finished = True
        return match.stop
