"""A converted model is the model: its weights bit by bit, its tokenizer, its configs; and it is there whole or not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxllm import convert as door
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import ConfigError, ModelLoadError
from jaxllm.model_loader import converter
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.model_loader.converter import convert
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint
from jaxllm.model_loader.orbax_manifest import MANIFEST_NAME
from jaxllm.quantization import SCHEMES
from jaxllm.tokenizer.loader import open_tokenizer
from tests.fakes.golden_families import case_names, read_case, write_folder
from tests.fakes.loaded_weights import assert_equal, load_weights
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder, write_tiny_gguf

FAMILIES = dict(case_names())  # the last case of each


def _entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_bit_by_bit(family: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", read_case(family, FAMILIES[family]))
    convert(str(source), tmp_path / "target")
    assert_equal(load_weights(tmp_path / "target"), load_weights(source))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family, name", [("llama", "gqa"), ("mixtral", "top_2")])
def test_quantized_weights_come_back_bit_by_bit(family: str, name: str, scheme: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", read_case(family, name))
    convert(str(source), tmp_path / "target", quantization=scheme)
    checkpoint = open_checkpoint(str(tmp_path / "target"))
    assert EngineArgs(model=str(tmp_path / "target")).create_engine_config(checkpoint).quantization == scheme
    assert_equal(load_weights(tmp_path / "target"), load_weights(source, quantization=scheme))
    other = EngineArgs(model="x", quantization="int8" if scheme != "int8" else "fp8")
    with pytest.raises(ConfigError, match=f"its weights are stored as {scheme}, got quantization"):
        other.create_engine_config(checkpoint)


def test_each_layout_loads_on_each_mesh(tmp_path: Path) -> None:
    """Heads that don't divide, on one to four devices: what was dealt to some is dealt anew to others."""
    source = write_tiny_folder(tmp_path / "source", tiny_llama(num_attention_heads=6, num_key_value_heads=3))
    script = (
        "import jax, sys\nfrom pathlib import Path\njax.config.update('jax_num_cpu_devices', 4)\n"
        "from jaxllm.model_loader.converter import convert\n"
        "from tests.fakes.loaded_weights import assert_equal, load_weights\n"
        f"source, folder = Path({str(source)!r}), Path({str(tmp_path)!r})\n"
        "wanted = {n: load_weights(source, num_devices=n, quantization='int8') for n in (1, 2, 4)}\n"
        "for stored in (1, 2, 4):\n"
        "    target = folder / f'for {stored}'\n"
        "    convert(str(source), target, quantization='int8', tensor_parallel_size=stored)\n"
        "    assert len(list((target / 'weights/layers.0.mlp.down.weight').glob('[0-9]*'))) == stored\n"
        "    for n in wanted:\n        assert_equal(load_weights(target, num_devices=n), wanted[n])\n"
        "print('all equal')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "all equal\n", done.stderr


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_floats_are_stored_as_the_source_has_them(stored: str, tmp_path: Path) -> None:
    dtype = np.float32 if stored == "float32" else ml_dtypes.bfloat16
    source = write_tiny_folder(tmp_path / "source", tiny_llama(dtype=stored), dtype=dtype)
    for wanted, target in (("auto", tmp_path / "a"), ("float16", tmp_path / "b")):
        manifest = convert(str(source), target, wanted)
        found = "float16" if wanted == "float16" else stored
        assert manifest.weights["layers.0.mlp.down.weight"].dtype == found
        assert manifest.weights["layers.0.mlp_norm.weight"].dtype == "float32"
    assert_equal(load_weights(tmp_path / "a", "bfloat16"), load_weights(source, "bfloat16"))
    assert_equal(load_weights(tmp_path / "a", "float32"), load_weights(source, "float32"))


def test_a_gguf_file_brings_its_vocabulary(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", tiny_llama())
    convert(str(source), tmp_path / "target")
    source_checkpoint, checkpoint = open_checkpoint(str(source)), open_checkpoint(str(tmp_path / "target"))
    source.unlink()
    assert checkpoint.config == source_checkpoint.config
    before, after = open_tokenizer(source_checkpoint), open_tokenizer(checkpoint)
    for text in ("the capital of France", "<|im_start|>user\n", "é\U0001f680"):
        assert after.encode(text) == before.encode(text)
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert after.chat_template == before.chat_template
    assert (after.bos_token_id, after.eos_token_ids) == (1, (2,))
    assert (tmp_path / "target" / "vocabulary.gguf").stat().st_size < 20_000
    load_weights(tmp_path / "target")


def test_a_folder_brings_its_files(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "source", tiny_llama(), num_shards=2)
    (source / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 0]}')
    (source / "weights.py").write_text("raise SystemExit")
    convert(str(source), tmp_path / "target")
    shutil.rmtree(source)
    checkpoint = open_checkpoint(str(tmp_path / "target"))
    assert checkpoint.generation_config == {"temperature": 0.6, "eos_token_id": [2, 0]}
    assert checkpoint.config["eos_token_id"] == [2, 0]
    assert open_tokenizer(checkpoint).chat_template
    assert _entries(tmp_path / "target") == [
        "config.json",
        "generation_config.json",
        "jaxllm.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights",
    ]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "source", tiny_llama())
    convert(str(source), tmp_path / "target")
    with pytest.raises(ConfigError, match="target: exists; give a folder that doesn't"):
        convert(str(source), tmp_path / "target")
    with pytest.raises(ConfigError, match="is converted already"):
        convert(str(tmp_path / "target"), tmp_path / "other")
    with pytest.raises(ModelLoadError, match="no model"):
        convert(str(tmp_path / "nothing"), tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="link: exists"):
        convert(str(source), tmp_path / "link")
    with pytest.raises(ConfigError, match="can't be written: File exists"):
        convert(str(source), source / "config.json" / "x")
    assert _entries(tmp_path) == ["link", "source", "target"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_is_interrupted_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_folder(tmp_path / "source", tiny_llama())

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(converter, "write_manifest", fail)
    with pytest.raises(ConfigError if isinstance(error, OSError) else KeyboardInterrupt):
        convert(str(source), tmp_path / "target")
    assert _entries(tmp_path) == ["source"]


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_that_contradicts_itself(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "source", tiny_llama())
    convert(str(source), tmp_path / "whole")
    manifest = json.loads((tmp_path / "whole" / MANIFEST_NAME).read_text())

    def changed(name: str, **fields: object) -> dict[str, object]:
        return {**manifest["weights"], name: {**manifest["weights"][name], **fields}}

    norm = "frame.norm.weight"
    cases = [
        ({"format_version": 2}, "expected format 'jaxllm-orbax' version 1, got 'jaxllm-orbax' version 2"),
        ({"format": "other"}, "got 'other' version 1"),
        ({"quantization": "int9"}, "quantization must be one of int8, "),
        ({"quantization": "int8"}, "must be int8"),
        ({"more": 1}, "is damaged: Object contains unknown field"),
        ({"weights": {}}, "must name 1 to"),
        ({"weights": {"../x": manifest["weights"][norm]}}, "'../x' can't be a weight's name"),
        ({"weights": {norm: manifest["weights"][norm]}}, "lacks the weight"),
        ({"weights": changed(norm, dtype="object")}, "is damaged"),
        ({"weights": changed(norm, shape=[2**60])}, "is damaged"),
        ({"weights": changed(norm, axes=[])}, "is damaged"),
        ({"weights": changed(norm, pieces=[0])}, "is damaged"),
        ({"weights": changed(norm, pieces=[2, 2])}, "is damaged"),
        ({"weights": changed(norm, shape=[32])}, "expected shape"),
        ({"weights": {**manifest["weights"], "x.y": manifest["weights"][norm]}}, "can't be read"),
    ]
    for changes, message in cases:
        _edit(tmp_path / "whole" / MANIFEST_NAME, **{**manifest, **changes})
        with pytest.raises(ModelLoadError, match=message):
            load_weights(tmp_path / "whole")
        (tmp_path / "whole" / MANIFEST_NAME).write_text(json.dumps(manifest))
    _edit(tmp_path / "whole" / "config.json", vocab_size=299)
    with pytest.raises(ModelLoadError, match=r"frame.embed.weight must be float32\[299, 64\] by its config"):
        load_weights(tmp_path / "whole")
    _edit(tmp_path / "whole" / "config.json", vocab_size=300, num_hidden_layers=1)
    with pytest.raises(ModelLoadError, match="has a weight 'layers.1.attention.out.weight', which its config doesn't"):
        load_weights(tmp_path / "whole")


def test_weights_behind_a_link(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "source", tiny_llama())
    convert(str(source), tmp_path / "target")
    (tmp_path / "target" / "weights").rename(tmp_path / "elsewhere")
    (tmp_path / "target" / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match="weights: must be an ordinary folder; links are not followed"):
        open_checkpoint(str(tmp_path / "target"))


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "source", tiny_llama())
    convert(str(source), tmp_path / "target")
    (tmp_path / "target" / "config.json").unlink()
    (tmp_path / "target" / "config.json").symlink_to("config.json")
    with pytest.raises(ModelLoadError, match="config.json: can't be read: "):
        open_checkpoint(str(tmp_path / "target"))


def test_the_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_folder(tmp_path / "source", tiny_llama())
    target = str(tmp_path / "target")
    assert door.main([str(source), target, "--quantization", "int8", "--dtype", "bfloat16"]) == 0
    assert f"load it with --model {target}" in capsys.readouterr().out
    checkpoint = open_checkpoint(target)
    assert isinstance(checkpoint, OrbaxCheckpoint)
    assert checkpoint.manifest.weights["frame.embed.weight"].dtype == "int8"
    assert door.main([str(source), target]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    for mesh in ("4", "tensor=0", "data=2", "tensor=2,data=2"):
        with pytest.raises(SystemExit):
            door.main([str(source), target, "--mesh", mesh])
        assert "must be tensor=N" in capsys.readouterr().err
