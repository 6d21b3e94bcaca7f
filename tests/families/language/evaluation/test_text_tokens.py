"""Prompts, streamed text and bytes a token."""

from __future__ import annotations

import pytest
import tokenizers
import torch

from phalanx.families.language.evaluation.text_tokenizer import TextStream, TextTokenizer
from phalanx.families.language.huggingface.folder_files import SpecialTokens
from small_models import byte_tokenizer

TEXT = "def café(x):\n    return '🎉 naïve'  # über\n"


END = SpecialTokens(end=(0,))


def tokenizer(special: SpecialTokens = END) -> TextTokenizer:
    return TextTokenizer(byte_tokenizer(), special)


def fallback_tokenizer() -> TextTokenizer:
    """Like Llama 2's: spaces as ▁, and a token for each byte for what the vocabulary lacks."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    model = tokenizers.models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[("▁", "a"), ("a", "b")],
        byte_fallback=True,
        unk_token=None,
    )
    raw = tokenizers.Tokenizer(model)
    raw.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    raw.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    raw.add_special_tokens(["<s>"])
    return TextTokenizer(raw, SpecialTokens())


@pytest.mark.parametrize("make", [tokenizer, fallback_tokenizer])
@pytest.mark.parametrize("text", [TEXT, "ab a b\n", "日本語 🎉🎉", "a"])
def test_streamed_pieces_make_the_text_and_never_half_a_character(make: type, text: str) -> None:
    reader = make()
    ids = reader.encode_prompt("a b" + text)
    start = len(reader.encode_prompt("a b"))
    stream = TextStream(reader, ids[:start])
    pieces = [stream.push(token) for token in ids[start:]]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert reader.decode(ids[:start]) + "".join(pieces) + stream.finish() == "a b" + text


def test_a_character_cut_at_the_end_is_shown_as_such() -> None:
    reader = tokenizer()
    ids = reader.encode_prompt("🎉")
    assert len(ids) > 1
    stream = TextStream(reader, [])
    assert [stream.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("make", [tokenizer, fallback_tokenizer])
@pytest.mark.parametrize("text", [TEXT, "ab a b\n", "日本語 🎉🎉"])
def test_tokens_have_as_many_bytes_together_as_their_text(make: type, text: str) -> None:
    reader = make()
    counts = reader.byte_counts(320)
    assert int(counts[torch.tensor(reader.encode_prompt(text))].sum()) == len(text.encode())


def test_special_tokens_and_unused_rows_have_no_bytes() -> None:
    reader = tokenizer()
    assert reader.decode([0, *reader.encode_prompt("a b"), 0]) == "a b"
    assert reader.byte_counts(400)[0] == 0
    assert not reader.byte_counts(400)[300:].any()
    assert len(reader.byte_counts(200)) == 200


def test_an_empty_prompt_is_the_start_of_a_document() -> None:
    assert tokenizer().encode_prompt("") == [0]
    assert tokenizer(SpecialTokens(begin=3, end=(0,))).encode_prompt("") == [3]
    assert tokenizer(SpecialTokens()).encode_prompt("") == []


def test_a_prompt_begins_as_documents_did_in_training() -> None:
    """Tokenizers of others put a token in front, which our own training never has."""
    ids = tokenizer().encode_prompt("a b")
    for begin, first in ((None, []), (3, [3])):
        reader = tokenizer(SpecialTokens(begin=begin, end=(0,)))
        token = reader._tokenizer.id_to_token(3)
        reader._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, 3)]
        )
        assert reader.encode_prompt("a b") == [*first, *ids]
