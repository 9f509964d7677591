"""Progress of long work: a bar on a terminal, nothing where stderr is a file or a pipe."""

from typing import Any

from tqdm import tqdm


def progress_bar(total: float | None, description: str, unit: str, **options: Any) -> "tqdm[Any]":
    """Returns a tqdm bar on stderr, to be used in a with statement and fed by `update`.

    Args:
      total: Units of work, or None if unknown.
      description: What is being done.
      unit: Name of one unit; "B" scales to kB, MB and GB.
      **options: Passed on to tqdm.
    """
    scale = unit == "B"
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=scale,
        unit_divisor=1000,
        disable=None,
        dynamic_ncols=True,
        leave=False,
        **options,
    )
