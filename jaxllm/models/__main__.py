"""`python -m jaxllm.models`: the door to the list of models."""

import sys

from jaxllm.entrypoints.model_list import main

if __name__ == "__main__":
    sys.exit(main())
