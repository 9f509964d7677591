"""Progress of long work: a bar on a terminal, nothing where stderr is a file or a pipe, and a report to who asked.

with reporting_to(report), progress_bar(num_bytes, "loading weights", "B") as bar: ...
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from tqdm import tqdm

# What is being done, how much of it in percent, seconds to its end; None where nobody knows.
Report = Callable[[str, float | None, float | None], None]

_REPORT_INTERVAL_S = 0.1
_current_report: ContextVar[Report | None] = ContextVar("progress_report", default=None)


@contextmanager
def reporting_to(report: Report) -> Iterator[None]:
    """Every bar that this thread makes inside also calls `report`, now and then while it is updated."""
    token = _current_report.set(report)
    try:
        yield
    finally:
        _current_report.reset(token)


def report_progress(phase: str, percent: float | None, eta_s: float | None) -> None:
    """Passes on the progress of somebody elsewhere to who asked here."""
    report = _current_report.get()
    if report is not None:
        report(phase, percent, eta_s)


class Progress:
    """Counts work done. A context manager; made by progress_bar."""

    def __init__(self, bar: "tqdm[Any]", total: float | None, description: str, report: Report | None) -> None:
        self._bar = bar
        self._total = total
        self._description = description
        self._report = report
        self._num_done = 0.0
        self._start_s = time.monotonic()
        self._reported_s = self._start_s
        if report is not None:
            report(description, 0.0 if total else None, None)

    def update(self, amount: float) -> None:
        """Adds to the work done."""
        self._bar.update(amount)
        self._num_done += amount
        now_s = time.monotonic()
        if self._report is None or not self._total or now_s < self._reported_s + _REPORT_INTERVAL_S:
            return
        self._reported_s = now_s
        share = min(self._num_done / self._total, 1.0)
        eta_s = (now_s - self._start_s) * (1 - share) / share if share else None
        self._report(self._description, 100 * share, eta_s)

    def update_to(self, amount: float) -> None:
        """Says how much work has been done in all. A smaller amount than before changes nothing."""
        self.update(max(0.0, amount - self._num_done))

    def set_postfix_str(self, text: str) -> None:
        """Shows `text` behind the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()


def progress_bar(total: float | None, description: str, unit: str, **options: Any) -> Progress:
    """Returns a bar on stderr, to be used in a with statement and fed by `update`.

    Args:
      total: Units of work, or None if unknown.
      description: What is being done.
      unit: Name of one unit; "B" scales to kB, MB and GB.
      **options: Passed on to tqdm.
    """
    bar = tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1000,
        disable=None,
        dynamic_ncols=True,
        leave=False,
        **options,
    )
    return Progress(bar, total, description, _current_report.get())
