"""Tokenizers: a byte-level BPE trained on the text itself, or one that people already have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.errors import ConfigError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[SEP]")
"""Tokens that end a document, in the order they are looked for."""
TRAINING_BYTES = 20_000_000
"""Text that training a tokenizer looks at; more changes the merges little."""


def train_tokenizer(documents: Iterable[str], total_bytes: int, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) with `vocab_size` entries.

    Where there is more text than `TRAINING_BYTES`, documents are taken by a hash of their text, independent of the one
    that chooses the split, so that the choice does not depend on their order. total_bytes: size of all text, or an
    estimate. Raises ConfigError for a vocabulary that cannot hold all bytes.
    """
    check_trainable(vocab_size, None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_chosen(documents, TRAINING_BYTES / max(1, total_bytes)), trainer)
    return tokenizer


def check_trainable(vocab_size: int, end_token: str | None) -> None:
    """Raise ConfigError unless a tokenizer trained here can have `vocab_size` entries and end documents with `end_token`.

    end_token: None stands for what such a tokenizer ends documents with.
    """
    least = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < least:
        raise ConfigError(f"--vocab-size={vocab_size} is too small for a byte-level tokenizer; give at least {least}")
    if end_token not in (None, END_OF_DOCUMENT):
        raise ConfigError(
            f"--end-token={end_token}: a tokenizer trained here ends documents with {END_OF_DOCUMENT}; "
            "leave --end-token out, or name a --tokenizer that has it"
        )


def _chosen(documents: Iterable[str], share: float) -> Iterator[str]:
    return (text for text in documents if share >= 1.0 or text_share(text, b"tokenizer") < share)


def text_share(text: str, purpose: bytes = b"") -> float:
    """A number in [0, 1) that depends on the text and the purpose alone, evenly spread over texts.

    purpose: at most 16 bytes; numbers for different purposes are independent, the empty one chooses the split.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**56


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a Hugging Face tokenizer.json, a folder with one, or a folder with GPT-2's vocab.json and merges.txt.

    Raises DataError when there is none, or it cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    vocabulary, merges = path / "vocab.json", path / "merges.txt"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        if vocabulary.is_file() and merges.is_file():
            return _from_gpt2(vocabulary, merges)
    except Exception as error:  # the tokenizers package raises plain Exception
        raise DataError(f"{file}: not a tokenizer that can be read: {error}") from error
    raise DataError(
        f"{path}: no tokenizer there; give a tokenizer.json, or a folder with it or with vocab.json and merges.txt"
    )


def _from_gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_DOCUMENT) is not None:
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id the tokenizer can give."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_document(tokenizer: Tokenizer, named: str | None = None) -> int:
    """Id of the token that ends a document: the one `named`, else the first known one that the tokenizer has.

    Raises ConfigError when it has none of them.
    """
    for token in (named,) if named else KNOWN_ENDS:
        number = tokenizer.token_to_id(token)
        if number is not None:
            return int(number)
    raise ConfigError(
        f"the tokenizer has no token {named or ' or '.join(KNOWN_ENDS)} to end documents with; name one with --end-token"
    )
