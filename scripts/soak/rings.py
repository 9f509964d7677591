"""Messages of random sizes through a ring, each checked by every reader."""

import argparse

from tests.fakes.ring_peer import send_to_readers

_NUM_READERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak_rings", description=__doc__)
    parser.add_argument("messages", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    elapsed_s = send_to_readers(_NUM_READERS, args.messages, args.seed)
    print(f"{args.messages} messages to {_NUM_READERS} readers, in order and unchanged: {elapsed_s:.0f} s")


if __name__ == "__main__":
    main()
