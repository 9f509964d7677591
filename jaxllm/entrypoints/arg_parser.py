"""An argparse parser whose errors are one line, and that guesses which flag was meant."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn


class ArgParser(argparse.ArgumentParser):
    """Takes `--max_tokens` for `--max-tokens`, and positional arguments anywhere among the flags."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Returns the parsed arguments; on a mistake, prints one line and exits with code 2."""
        namespace, unknown = self.parse_known_intermixed_args(_with_dashes(argv))
        if unknown:
            self.error(self._unknown_flag(unknown[0]))
        return namespace

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message}; see --help\n")
        sys.exit(2)

    def _unknown_flag(self, argument: str) -> str:
        flag = argument.split("=", 1)[0]
        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(flag, known, n=1)
        return f"unknown flag {flag}" + (f", did you mean {close[0]}?" if close else "")


def positive_int(text: str) -> int:
    """Reads a flag's value.

    Raises:
      argparse.ArgumentTypeError: It isn't an integer of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _with_dashes(argv: Sequence[str]) -> list[str]:
    args = list(argv)
    end = args.index("--") if "--" in args else len(args)
    for index, argument in enumerate(args[:end]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            args[index] = flag.replace("_", "-") + equals + value
    return args
