"""Text to token ids and back: bytes for proxies, the checkpoint's own tokenizer for published weights."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

BOS, EOS, BYTE_VOCABULARY = 256, 257, 258


class ByteTokenizer:
    """UTF-8 bytes 0..255 after a beginning-of-sequence token. Ids that are no bytes decode to U+FFFD, the two
    special ones to nothing."""

    eos_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return [BOS, *text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        runs = (b"" if i in (BOS, EOS) else bytes([i]) if i < BOS else "\ufffd".encode() for i in token_ids)
        return b"".join(runs).decode(errors="replace")

    def texts(self, count: int) -> list[str]:
        """Of each of the first `count` tokens alone: a character, or a name of its own for what is none."""
        return [chr(token_id) if token_id < 128 else f"<{token_id}>" for token_id in range(count)]


class CheckpointTokenizer:
    """`tokenizer.json` of a checkpoint folder; `eos_token_id` from its config.json.

    Raises RuntimeError when the `tokenizers` package is not in the engine's environment, FileNotFoundError when
    the folder has no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        try:
            backend = importlib.import_module("tokenizers")
        except ImportError as error:
            raise RuntimeError(
                "model.tokenizer is 'checkpoint', which needs the package `tokenizers` in the engine's environment: "
                "install it there, or use model.tokenizer=byte for a proxy."
            ) from error
        path = folder / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist: model.tokenizer is 'checkpoint', so the checkpoint must bring its own."
            )
        self._backend = backend.Tokenizer.from_file(str(path))
        config = json.loads((folder / "config.json").read_text())
        eos = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id", []))
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids))
        return text

    def texts(self, count: int) -> list[str]:
        """Of each of the first `count` tokens alone."""
        return [self.decode([token_id]) for token_id in range(count)]


def make_tokenizer(kind: str, vocab_size: int, folder: Path) -> ByteTokenizer | CheckpointTokenizer:
    """The tokenizer that `Model.tokenizer` names: `byte` or `checkpoint`."""
    if kind == "checkpoint":
        return CheckpointTokenizer(folder)
    if kind != "byte":
        raise ValueError(f"model.tokenizer is {kind!r}; choose byte or checkpoint.")
    if vocab_size < BYTE_VOCABULARY:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the byte tokenizer needs {BYTE_VOCABULARY} ids: 256 bytes, a first "
            "and a last token."
        )
    return ByteTokenizer()
