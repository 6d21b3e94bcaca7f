"""Tokenizers: a byte-level BPE trained on the text itself, or one that people already have.

A tokenizer.json is a small program of patterns and replacements, perhaps a stranger's: what it may do to a text is checked
as it is read, and what goes wrong inside the tokenizers package comes out as a DataError that names the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.config.section import MAX_VOCABULARY
from phalanx.errors import ConfigError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[SEP]")
"""Tokens that end a document, in the order they are looked for."""
TRAINING_BYTES = 20_000_000
"""Text that training a tokenizer looks at; more changes the merges little."""
MAX_GROWTH = 64
"""How many times longer than the text its replacements may make it, in bytes, one after another."""
_MAX_PREPENDED = 1000
"""Bytes that a normalizer may put in front of a text."""


def train_tokenizer(documents: Iterable[str], total_bytes: int, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) with `vocab_size` entries.

    documents, total_bytes: see `sample_documents`. Raises ConfigError for a vocabulary that cannot hold all bytes.
    """
    check_trainable(vocab_size, None)
    tokenizer = Tokenizer(models.BPE())
    # Bytes rather than characters: every text can be written, whatever its script.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_documents(documents, total_bytes), trainer)
    return tokenizer


def sample_documents(documents: Iterable[str], total_bytes: int) -> Iterator[str]:
    """Yield the documents that a tokenizer is trained on, some `TRAINING_BYTES` of text.

    They are taken by a hash of their text, independent of the one that chooses the split, so that the choice does not
    depend on their order. total_bytes: size of all text, or an estimate.
    """
    share = TRAINING_BYTES / max(1, total_bytes)
    return (text for text in documents if share >= 1.0 or text_share(text, b"tokenizer") < share)


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


def text_share(text: str, purpose: bytes = b"") -> float:
    """Return a number in [0, 1) that depends on the text and the purpose alone, evenly spread over texts.

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
            return parse_tokenizer(file.read_bytes(), file)
        if vocabulary.is_file() and merges.is_file():
            with _panics_explained(f"{vocabulary}: not a vocabulary that can be read"):
                made = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            if made.token_to_id(END_OF_DOCUMENT) is not None:
                made.add_special_tokens([END_OF_DOCUMENT])
            _check_ids(made, vocabulary)
            return made
    except DataError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise DataError(f"{file}: not a tokenizer that can be read: {error}") from error
    raise DataError(
        f"{path}: no tokenizer there; give a tokenizer.json, or a folder with it or with vocab.json and merges.txt"
    )


def parse_tokenizer(content: bytes, where: Path | str) -> Tokenizer:
    """Make a tokenizer of the content of a tokenizer.json; `where` names it in messages.

    Raises DataError for one that cannot be read, that makes texts much longer, or whose ids no model can have.
    """
    try:
        with _panics_explained(f"{where}: not a tokenizer that can be read"):
            text = content.decode()
            tokenizer = Tokenizer.from_str(text)
        # Read once more as plain JSON: the package does not give out what its components do.
        described = json.loads(text)
    except DataError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise DataError(f"{where}: not a tokenizer that can be read: {error}") from error
    # A few replacements, one after another, could turn a word into gigabytes.
    for component in ("normalizer", "decoder"):
        growth = _text_growth(described.get(component))
        if growth > MAX_GROWTH:
            raise DataError(
                f"{where}: its {component} can make a text {growth:.3g} times longer; at most {MAX_GROWTH} times is "
                "taken; give another tokenizer"
            )
    _check_ids(tokenizer, where)
    return tokenizer


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], where: Path | str, *, add_special_tokens: bool = False
) -> list[Encoding]:
    """Tokenize texts; `where` names the tokenizer's file.

    Raises DataError, naming the component, where the tokenizer fails on one of them: a pattern may take exponential time,
    which the package gives up on.
    """
    try:
        with _panics_explained("the tokenizers package gives up"):
            encoded: list[Encoding] = tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
            return encoded
    except DataError as error:
        raise DataError(f"{where}: {_failing_component(tokenizer, texts)}: {error}; give another tokenizer") from None


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int], where: Path | str) -> str:
    """Return the text of ids, special tokens left out. Raises DataError where the tokenizer's decoder fails on them."""
    with _panics_explained(f"{where}: its decoder fails on {len(ids)} tokens"):
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


@contextmanager
def _panics_explained(what: str) -> Iterator[None]:
    """Turn what the tokenizers package throws when its Rust code panics into a DataError that begins with `what`."""
    try:
        yield
    except BaseException as error:
        # Its class is no Exception and cannot be imported: pyo3 makes it when it is first needed.
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error}") from None


def _failing_component(tokenizer: Tokenizer, texts: Sequence[str]) -> str:
    """Say which component of the tokenizer fails on which of the texts."""
    for text in texts:
        # Only its beginning, escaped: a text may be megabytes long and hold anything.
        shown = f"a text of {len(text):,} characters that begins with {text[:30]!a}"
        normalized = text
        try:
            with _panics_explained(""):
                if tokenizer.normalizer is not None:
                    normalized = tokenizer.normalizer.normalize_str(text)
        except DataError:
            return f"its normalizer fails on {shown}"
        try:
            with _panics_explained(""):
                if tokenizer.pre_tokenizer is not None:
                    tokenizer.pre_tokenizer.pre_tokenize_str(normalized)
        except DataError:
            return f"its pre_tokenizer fails on {shown}"
    return "its model or post_processor fails"


def _text_growth(component: Any) -> float:
    """Return how many times longer a normalizer or decoder, as described in a tokenizer.json, can make a text."""
    if not isinstance(component, dict):
        return 1.0
    parts = component.get("normalizers") or component.get("decoders")
    if isinstance(parts, list):
        product = 1.0
        for part in parts:
            product = min(product * _text_growth(part), 1e300)
        return product
    content, pattern = component.get("content"), component.get("pattern")
    if isinstance(content, str) and isinstance(pattern, dict):
        replaced = pattern.get("String")
        if isinstance(replaced, str) and replaced:
            return max(1.0, len(content.encode()) / len(replaced.encode()))
        # A regular expression may match nothing, between any two bytes.
        return 1.0 + len(content.encode())
    prepended = component.get("prepend")
    return float("inf") if isinstance(prepended, str) and len(prepended.encode()) > _MAX_PREPENDED else 1.0


def _check_ids(tokenizer: Tokenizer, where: Path | str) -> None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{where}: it has no tokens; give another tokenizer")
    # A single far id would make the embedding table as long.
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= MAX_VOCABULARY:
        raise DataError(
            f"{where}: its vocabulary gives the token {token!a} the id {largest:,}, beyond {MAX_VOCABULARY - 1:,}, the "
            "last that a model can have; give another tokenizer"
        )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id the tokenizer can give."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_document(tokenizer: Tokenizer, named: str | None = None) -> int:
    """Return id of the token that ends a document: the one `named`, else the first known one that the tokenizer has.

    Raises ConfigError when it has none of them.
    """
    for token in (named,) if named else KNOWN_ENDS:
        number = tokenizer.token_to_id(token)
        if number is not None:
            return int(number)
    raise ConfigError(
        f"the tokenizer has no token {named or ' or '.join(KNOWN_ENDS)} to end documents with; name one with --end-token"
    )
