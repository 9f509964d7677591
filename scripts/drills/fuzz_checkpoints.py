"""Opens damaged checkpoints and counts what became of them. Exit code 1 where one did what none may."""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fakes.checkpoint_fuzz import Case, faults, run_cases
from tests.fakes.fuzz_seeds import (
    family_cases,
    folder_cases,
    gguf_cases,
    write_family_seeds,
    write_folder_seeds,
    write_gguf_seeds,
)

OPENER = "tests.fakes.fuzz_openers:open_model"
KINDS: dict[str, tuple[Callable[[Path], list[Path]], Callable[[Path, list[Path], int], Iterator[Case]]]] = {
    "GGUF files": (write_gguf_seeds, gguf_cases),
    "folders": (write_folder_seeds, folder_cases),
    "configs of all families": (write_family_seeds, family_cases),
}


def main() -> int:
    count, has_faults = int(sys.argv[1]), False
    for name, (write_seeds, make_cases) in KINDS.items():
        with tempfile.TemporaryDirectory() as temporary:
            seeds = write_seeds(Path(temporary) / "seeds")
            outcomes = run_cases(OPENER, seeds[0], make_cases(Path(temporary) / "cases", seeds, count))
        kinds = Counter(outcome.kind for outcome in outcomes)
        print(f"{len(outcomes)} damaged {name}: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}")
        found = faults(outcomes)
        print(*found, sep="\n", end="\n" if found else "")
        has_faults |= bool(found)
    return has_faults


if __name__ == "__main__":
    sys.exit(main())
