"""The byte-level BPE tokenizer, built from the GGUF metadata with the PyPI package `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smollm2.weights import metadata

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer as Backend

_CONTROL = 3  # `tokenizer.ggml.token_type` of a token that stands for itself and is never made of bytes


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. `eos` (`<|im_end|>`) ends an answer; no token is added to a prompt."""

    backend: Backend
    eos: int

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Control tokens such as `<|im_start|>` are recognised where they are written out."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, without control tokens."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=True))


def load_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Build the tokenizer: digits one by one, then byte-level BPE without a leading space."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    tokens: list[str] = metadata(reader, "tokenizer.ggml.tokens")
    merges: list[str] = metadata(reader, "tokenizer.ggml.merges")
    kinds: list[int] = metadata(reader, "tokenizer.ggml.token_type")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    return Tokenizer(backend=backend, eos=int(metadata(reader, "tokenizer.ggml.eos_token_id")))
