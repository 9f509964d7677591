"""`python -m jaxllm.plan`: what a configuration would put on which devices, without loading a weight. No logic here."""

import logging
import os
import sys
from collections.abc import Sequence

from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.exceptions import EXIT_USAGE, JaxllmError
from jaxllm.model_loader.checkpoint import open_checkpoint

_DESCRIPTION = (
    "Prints the mesh, and each array's shape and sharding, for the devices that the flags ask for; on CPU it makes as "
    "many up as it needs. Takes the flags of `jaxllm generate`. No weight is read."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan and returns the exit code. `argv` defaults to the process's arguments."""
    parser = ArgParser("jaxllm plan", _DESCRIPTION)
    EngineArgs.add_cli_args(parser)
    args = EngineArgs.from_cli_args(parser.parse(sys.argv[1:] if argv is None else list(argv)))
    logging.getLogger("jaxllm").setLevel(logging.WARNING)
    try:
        config = args.create_engine_config(open_checkpoint(args.model))
        # Before JAX starts: it counts its devices once.
        num_devices = config.parallel.world_size * config.parallel.data_parallel_size
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(num_devices))
        from jaxllm.worker.plan_report import plan_report

        for line in plan_report(config):
            sys.stdout.write(f"{line}\n")
    except JaxllmError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
