"""Makes tests/golden/families: each family's tiny models through transformers. Uses nothing of jaxllm.

Weights come from tests/fakes/seeded_weights.py, so that a file holds configs, tensor names and shapes, and the
logits alone. Run by scripts/make_golden, in an environment that has torch and transformers.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.golden.family_cases import FAMILIES  # noqa: E402
from tests.fakes.seeded_weights import seeded_tensor  # noqa: E402

NUM_PROMPT_TOKENS = 20
NUM_GREEDY_TOKENS = 6
_NOISE = ("dtype", "transformers_version", "_name_or_path", "use_cache", "initializer_range")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the families' golden files with transformers.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", action="store_true", help="replace the golden files")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family in args.families:
        class_name, common, cases = FAMILIES[family]
        made, logits = {}, {}
        for name, fields in cases.items():
            made[name], logits[name] = _case(getattr(transformers, class_name)(**{**common, **fields}))
        _compare(args.folder / f"{family}.npz", logits)
        if args.write:
            (args.folder / f"{family}.json").write_text(_dumps(made), encoding="utf-8")
            np.savez_compressed(args.folder / f"{family}.npz", **logits)


@torch.inference_mode()
def _case(config: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Returns what the golden file says of a model, and its logits [T, V] float32 over prompt and greedy tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        with safe_open(path, "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        save_file({name: seeded_tensor(name, tuple(shape)) for name, shape in shapes.items()}, path)
        saved = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    model.eval()
    token_ids = [3 + 7 * i % (config.vocab_size - 3) for i in range(NUM_PROMPT_TOKENS)]
    for _ in range(NUM_GREEDY_TOKENS):
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
        best = torch.topk(logits[-1], 2).values
        assert best[0] - best[1] > 1e-3, "the reference is unsure of a greedy token: change the case"
        token_ids.append(int(logits[-1].argmax()))
    kept = {key: value for key, value in saved.items() if key not in _NOISE}
    return {"config": kept, "tensors": shapes, "token_ids": token_ids}, logits.numpy()


def _compare(path: Path, logits: dict[str, np.ndarray]) -> None:
    stored = np.load(path) if path.exists() else {}
    for name, values in logits.items():
        is_known = name in stored and stored[name].shape == values.shape
        difference = f"within {np.abs(stored[name] - values).max():.2g}" if is_known else "new"
        print(f"{path.stem} {name}: {difference}, logits from {values.min():.2f} to {values.max():.2f}")


def _dumps(cases: dict[str, Any]) -> str:
    """Returns JSON with a line a field of each case."""
    lines = []
    for name, case in cases.items():
        fields = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in case.items())
        lines.append(f" {json.dumps(name)}: {{\n  {fields}\n }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
