"""Random lives of the scheduler, one after another, each told by its seed. Run by scripts/soak_scheduler.

Stops at the first broken rule and says which seed brings it back: --seed SEED --episodes 1.
"""

import argparse
import sys
import time

from tests.fakes.scheduler_episode import SchedulerEpisode

ACTIONS_PER_EPISODE = 300
PROGRESS_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the scheduler through random lives.")
    parser.add_argument("steps", nargs="?", type=int, default=1_000_000, help="scheduler steps in all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode; the next ones count up")
    parser.add_argument("--episodes", type=int, default=None, help="stop after so many episodes")
    args = parser.parse_args()
    start = last_word = time.monotonic()
    num_steps, seed, swaps, copies = 0, args.seed, 0, 0
    while num_steps < args.steps and (args.episodes is None or seed < args.seed + args.episodes):
        episode = SchedulerEpisode(seed)
        try:
            episode.run(ACTIONS_PER_EPISODE)
        except BaseException:
            print(f"seed {seed} fails in its step {episode.num_steps}", file=sys.stderr)
            raise
        stats = episode.scheduler.stats()
        num_steps, seed = num_steps + episode.num_steps, seed + 1
        swaps, copies = swaps + stats.num_swapped_out_blocks, copies + stats.num_copied_blocks
        if time.monotonic() - last_word > PROGRESS_S or num_steps >= args.steps:
            last_word = time.monotonic()
            print(
                f"{num_steps} steps, seeds {args.seed} to {seed - 1}, {swaps} blocks swapped out, {copies} copied, "
                f"{last_word - start:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
