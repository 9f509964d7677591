"""Python's cyclic garbage collector in a process that serves. Knows nothing of what is collected."""

import gc

_YOUNG_OBJECTS = 50_000  # Python's own 700 is less than one step of 256 sequences makes and drops again


def settle() -> None:
    """Call once everything that lives as long as the process is alive: the collector never looks at it again.

    What a step makes dies with the step, by reference counts alone; so the collector comes seldom after this.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
