"""Tokenizers: trained here on a fair sample of the text, or brought along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from phalanx.errors import ConfigError, DataError
from phalanx.families.language.data import tokenizer as module
from phalanx.families.language.data.prepare_text import Options, prepare_text
from phalanx.families.language.data.tokenizer import (
    check_trainable,
    encode_texts,
    end_of_document,
    load_tokenizer,
    text_share,
    train_tokenizer,
    vocabulary_size,
)
from token_data import write_tokenizer

SHARED = Path(__file__).parents[5] / "shared" / "data"


def test_a_trained_tokenizer_has_the_size_asked_for_and_every_byte() -> None:
    tokenizer = train_tokenizer(["low lower lowest " * 20], 340, 260)
    assert vocabulary_size(tokenizer) == 260
    text = "low \x00\t ünï 日本 \N{SLIGHTLY SMILING FACE}"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert encoded.tokens[0] == "low"
    assert end_of_document(tokenizer) == tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.decode([end_of_document(tokenizer)]) == ""


def test_more_text_than_is_looked_at_is_sampled_by_text_and_not_by_order(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{word}{i}" for i in range(1000) for word in ("alpha ", "beta ")]
    size = sum(map(len, texts))
    whole = train_tokenizer(texts, size, 300).to_str()
    monkeypatch.setattr(module, "TRAINING_BYTES", size // 4)
    first = train_tokenizer(texts, size, 300).to_str()
    assert first != whole
    assert train_tokenizer(texts[::-1], size, 300).to_str() == first
    sample = [text for text in texts if text_share(text, b"tokenizer") < 0.25]
    assert train_tokenizer(sample, 0, 300).to_str() == first


def test_shares_are_even_and_independent_between_purposes() -> None:
    texts = [f"text {i}" for i in range(4000)]
    split = [text_share(text) for text in texts]
    sample = [text_share(text, b"tokenizer") for text in texts]
    for shares in (split, sample):
        assert all(0 <= share < 1 for share in shares)
        assert sum(share < 0.25 for share in shares) == pytest.approx(1000, abs=100)
    both = sum(a < 0.25 and b < 0.25 for a, b in zip(split, sample, strict=True))
    assert both == pytest.approx(250, abs=60)
    assert text_share("half \ud800") != text_share("half \ud801")


def test_what_cannot_be_trained_is_refused() -> None:
    check_trainable(257, None)
    check_trainable(257, "<|endoftext|>")
    with pytest.raises(
        ConfigError, match="--vocab-size=256 is too small for a byte-level tokenizer; give at least 257"
    ):
        check_trainable(256, None)
    with pytest.raises(
        ConfigError, match=r"--end-token=</s>: .*; leave --end-token out, or name a --tokenizer that has"
    ):
        check_trainable(257, "</s>")


def test_a_tokenizer_is_found_in_a_file_or_a_folder(tmp_path: Path) -> None:
    made = train_tokenizer(["some text"], 9, 257)
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).to_str() == load_tokenizer(tmp_path / "tokenizer.json").to_str() == made.to_str()


def test_the_two_files_of_gpt2_do_too(tmp_path: Path) -> None:
    made = train_tokenizer(["low lower lowest " * 20], 340, 260)
    made.model.save(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("lowest of all").ids == made.encode("lowest of all").ids
    assert loaded.decode(loaded.encode("lowest of all").ids) == "lowest of all"
    assert end_of_document(loaded) == end_of_document(made)


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no tokenizer there; give a tokenizer\.json, or a folder with it or with vocab.json"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer that can be read: "):
        load_tokenizer(tmp_path)


def test_the_end_of_a_document_is_a_usual_token_or_the_one_named() -> None:
    def having(*tokens: str) -> Tokenizer:
        return Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, tokens[0]))

    assert end_of_document(having("<unk>", "</s>", "<|endoftext|>")) == 2
    assert end_of_document(having("<unk>", "<eos>", "</s>")) == 2
    assert end_of_document(having("<unk>", "</s>", "<stop>"), "<stop>") == 2
    with pytest.raises(
        ConfigError, match=r"no token <\|endoftext\|> or .* to end documents with; name one with --end-to"
    ):
        end_of_document(having("<unk>"))
    with pytest.raises(ConfigError, match="the tokenizer has no token <stop> to end documents with"):
        end_of_document(having("<unk>", "</s>"), "<stop>")


def test_added_tokens_count_for_the_size() -> None:
    tokenizer = train_tokenizer(["text"], 4, 257)
    tokenizer.add_special_tokens(["<a>", "<b>"])
    assert vocabulary_size(tokenizer) == 259


@pytest.mark.skipif(
    not SHARED.exists(), reason="the reference data lies beside the checkout only where it was handed out"
)
def test_real_tokenizers_load_and_know_how_documents_end() -> None:
    gpt2 = load_tokenizer(SHARED / "tokenizers" / "gpt2")
    assert gpt2.encode("Hello world, Frontier!").ids[:2] == [15496, 995]
    assert (vocabulary_size(gpt2), end_of_document(gpt2)) == (50257, 50256)
    olmo = load_tokenizer(SHARED / "tokenizers" / "olmo" / "allenai_gpt-neox-olmo-dolma-v1_5.json")
    assert end_of_document(olmo) == olmo.token_to_id("<|endoftext|>")


def hostile(path: Path, **changes: Any) -> Path:
    """A byte-level tokenizer.json with other components."""
    write_tokenizer(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLING = {"type": "Sequence", "normalizers": [replace({"String": "a"}, "aa")] * 40}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": DOUBLING}, r"its normalizer can make a text 1.1e\+12 times longer; at most 64 times is taken"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING]}}, "its normalizer can make a text 1.1e"),
        ({"normalizer": replace({"Regex": "a|"}, "b" * 100)}, "its normalizer can make a text 101 times longer"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 10**6}}, "its normalizer can make a text inf times"),
        ({"decoder": {"type": "Sequence", "decoders": DOUBLING["normalizers"]}}, "its decoder can make a text 1.1e"),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 2**31}, "unk_token": "a"}},
            "its vocabulary gives the token 'b' the id 2,147,483,648, beyond 99,999,999",
        ),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "it has no tokens"),
    ],
)
def test_tokenizers_that_no_model_could_use(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = hostile(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(DataError, match=f"^{file}: {message}"):
        load_tokenizer(tmp_path)


def test_usual_normalizers_are_taken(tmp_path: Path) -> None:
    usual = [
        {"type": "Prepend", "prepend": "\u2581"},
        replace({"String": " "}, "\u2581"),
        {"type": "NFKD"},
        replace({"Regex": " {2,}"}, " "),
        replace({"String": "``"}, '"'),
    ]
    load_tokenizer(hostile(tmp_path / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": usual}))


CATASTROPHE = "(a+)+$"


@pytest.mark.parametrize(
    ("component", "described"),
    [
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": CATASTROPHE}, "behavior": "Isolated", "invert": False},
        ),
        ("normalizer", replace({"Regex": CATASTROPHE}, "b")),
    ],
)
def test_a_pattern_of_exponential_time_names_its_component(tmp_path: Path, component: str, described: Any) -> None:
    file = hostile(tmp_path / "tokenizer.json", **{component: described})
    tokenizer = load_tokenizer(file)
    with pytest.raises(DataError) as caught:
        encode_texts(tokenizer, ["harmless", "a" * 60 + "!"], file)
    assert str(caught.value).startswith(
        f"{file}: its {component} fails on a text of 61 characters that begins with '{'a' * 30}': "
    )


def test_preparing_with_such_a_pattern_ends_in_the_same_words(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": CATASTROPHE}, "behavior": "Isolated", "invert": False}
    file = hostile(tmp_path / "tokenizer.json", pre_tokenizer=pattern)
    (tmp_path / "text.txt").write_text("a" * 60 + "!")
    with pytest.raises(DataError, match=f"^{file}: its pre_tokenizer fails on a text of 61 characters"):
        prepare_text([str(tmp_path / "text.txt")], tmp_path / "out", Options(tokenizer=str(file)), workers=1)
