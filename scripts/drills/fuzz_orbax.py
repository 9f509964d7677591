"""Opens damaged converted models and counts what became of them. Exit code 1 where one did what none may."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fakes.checkpoint_fuzz import faults, run_cases
from tests.fakes.fuzz_orbax import orbax_cases, write_orbax_seeds

OPENER = "tests.fakes.fuzz_openers:open_model"


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        seeds = write_orbax_seeds(Path(temporary) / "seeds")
        outcomes = run_cases(OPENER, seeds[0], orbax_cases(Path(temporary) / "cases", seeds, int(sys.argv[1])))
    kinds = Counter(outcome.kind for outcome in outcomes)
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    sys.stdout.write(f"{len(outcomes)} damaged models: {counts}\n")
    found = faults(outcomes)
    sys.stdout.write("".join(f"{fault}\n" for fault in found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
