"""Text to tokens and back, as evaluation needs it: prompts, text that appears piece by piece, bytes a token stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tokenizers
import torch
from torch import Tensor

from phalanx.errors import CheckpointError, DataError
from phalanx.families.language.data.tokenizer import decode_ids, encode_texts, parse_tokenizer
from phalanx.families.language.huggingface.folder_files import TOKENIZER, SpecialTokens, TokenizerFiles

_CUT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder shows for a character whose bytes are not all there."""


class TextTokenizer:
    """A `tokenizer.json` and the tokens that begin and end a document."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: SpecialTokens, name: str = f"the {TOKENIZER}") -> None:
        self.special = special
        self._tokenizer = tokenizer
        self._name = name

    @classmethod
    def from_files(cls, files: TokenizerFiles, where: Path) -> Self:
        """Build from files; `where` names their origin in messages. Raises CheckpointError if they make no tokenizer."""
        name = f"the {TOKENIZER} of {where}"
        try:
            tokenizer = parse_tokenizer(files.files[TOKENIZER], name)
        except DataError as error:
            raise CheckpointError(str(error)) from None
        return cls(tokenizer, files.special, name)

    @classmethod
    def from_file(cls, path: Path, end_of_document: int | None) -> Self:
        """Build from a tokenizer.json and the id that ends a document. Raises CheckpointError as `from_files` does."""
        special = SpecialTokens(end=() if end_of_document is None else (end_of_document,))
        return cls.from_files(TokenizerFiles({TOKENIZER: path.read_bytes()}, special), path.parent)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return all tokens with their ids."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode_prompt(self, text: str) -> list[int]:
        """Encode `text`, after what the tokenizer itself puts in front where the model was trained with a token that
        begins documents; empty text is the start of a document."""
        # Our own training has documents one after the other, with nothing but the end of one before the next.
        begins = self.special.begin is not None
        (encoded,) = encode_texts(self._tokenizer, [text], self._name, add_special_tokens=begins)
        ids: list[int] = encoded.ids
        begin = self.special.end[:1] if self.special.begin is None else (self.special.begin,)
        return ids or list(begin)

    def encode(self, text: str) -> list[int]:
        """Encode `text` alone, without special tokens."""
        (encoded,) = encode_texts(self._tokenizer, [text], self._name)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids`, special tokens left out."""
        return decode_ids(self._tokenizer, ids, self._name)

    def byte_counts(self, vocab_size: int) -> Tensor:
        """Return the number of UTF-8 bytes of text that each token stands for, int64 [vocab_size]; 0 for special
        tokens and unused rows.

        Exact for byte-level tokenizers and for those with byte fallback: the tokens of a text have as many bytes together
        as the text that the tokenizer gives back for them.
        """
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        byte_level = "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))
        added = self._tokenizer.get_added_tokens_decoder()
        for token, number in self.vocabulary.items():
            if number >= vocab_size or (number in added and added[number].special) or number in self.special.end:
                continue
            if byte_level and number not in added:
                counts[number] = len(token)  # its alphabet has one character a byte
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                # Byte fallback: the token <0x0A> stands for the one byte that it names.
                counts[number] = 1
            else:
                counts[number] = len(token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode())
        return counts


class TextStream:
    """Turns tokens into text as they come, never showing half a character."""

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)
        self._shown = len(self._ids)
        # A few tokens of context decide whether a word begins with a space.
        self._start = max(0, self._shown - 8)

    def push(self, token: int) -> str:
        """Return the text that `token` completes, perhaps none."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Return what remains at the end, a cut character shown as such."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        # Decoded in context and compared: the text of one token alone may lack its space.
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        now = self._tokenizer.decode(self._ids[self._start :])
        # A character of several bytes is shown when its last token is there.
        if now.endswith(_CUT) and not final:
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]
