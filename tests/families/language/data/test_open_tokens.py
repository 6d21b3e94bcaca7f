from pathlib import Path

import numpy as np
import pytest

from foreign_tokens import write_megatron, write_tokens
from phalanx.errors import DataError
from phalanx.families.language.data.mds import MdsSource
from phalanx.families.language.data.megatron import MegatronSource
from phalanx.families.language.data.open_tokens import open_source
from phalanx.families.language.data.token_shards import ShardSource, read_token_manifest
from token_data import write_token_folder


def test_prepared_folders_are_told_by_their_manifest(tmp_path: Path) -> None:
    folder = write_token_folder(tmp_path / "tokens", train_tokens=2000, validation_tokens=500)
    train, validation = open_source(folder, "train"), open_source(folder, "validation")
    assert isinstance(train, ShardSource) and isinstance(validation, ShardSource)
    assert train.tokens > validation.tokens
    manifest = read_token_manifest(folder)
    manifest.model_copy(update={"splits": {"train": manifest.splits["train"]}}).write(folder)
    assert open_source(folder, "validation") is None


def test_mds_folders_are_told_by_their_index(tmp_path: Path) -> None:
    write_tokens(tmp_path / "flat")
    assert isinstance(open_source(tmp_path / "flat", "train"), MdsSource)
    assert open_source(tmp_path / "flat", "validation") is None
    write_tokens(tmp_path / "split" / "train")
    write_tokens(tmp_path / "split" / "val", lists=[[[1, 2, 3]]])
    train, validation = open_source(tmp_path / "split", "train"), open_source(tmp_path / "split", "validation")
    assert train.tokens == 24
    assert validation is not None and validation.tokens == 3


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatron_pairs_are_told_by_their_endings(tmp_path: Path, ending: str) -> None:
    prefix = write_megatron(tmp_path / "text.v1_document")
    path = Path(f"{prefix}{ending}")
    assert isinstance(open_source(path, "train"), MegatronSource)
    assert open_source(path, "validation") is None
    write_megatron(Path(f"{prefix}_valid"), [[1, 2]])
    validation = open_source(path, "validation")
    assert validation is not None
    assert validation.read(np.array([0]), 2).tolist() == [[1, 2]]


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path, "train")
    return str(caught.value)


def test_half_a_megatron_pair_is_named(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "text")
    Path(f"{prefix}.idx").unlink()
    assert "text.idx: No such file or directory; Megatron data is a .bin and an .idx" in refusal(prefix)


def test_a_folder_with_validation_only_cannot_train(tmp_path: Path) -> None:
    write_tokens(tmp_path / "validation")
    assert refusal(tmp_path) == f"{tmp_path} has no train split; name data to train on"


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    write_token_folder(tmp_path / "stories", train_tokens=2000, validation_tokens=500)
    write_megatron(tmp_path / "wiki_text_document")
    looked_for = "nothing there, neither a folder nor a Megatron .bin/.idx pair"
    assert refusal(tmp_path / "storys") == f"{tmp_path}/storys: {looked_for}; did you mean {tmp_path}/stories?"
    assert f"did you mean {tmp_path}/wiki_text_document?" in refusal(tmp_path / "wiki_text")
    assert f"did you mean {tmp_path}/stories?" in refusal(tmp_path / "storie" / "deeper")
    (tmp_path / ".xyzw").mkdir()
    assert refusal(tmp_path / "xyz").endswith(
        f"{tmp_path} holds stories, wiki_text_document; "
        f"text is tokenized with: phalanx data prepare TEXT --out {tmp_path}/xyz"
    )


def test_a_relative_missing_path_is_explained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "; . holds nothing; text is tokenized with: " in refusal(Path("absent"))


def test_a_folder_of_something_else_says_what_it_holds(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"page{number}.txt").write_text("text")
    assert refusal(tmp_path) == (
        f"{tmp_path}: no manifest.json (prepared text), no index.json (MDS) and no .idx (Megatron) there; it holds "
        "page0.txt, page1.txt, page2.txt, page3.txt, page4.txt, page5.txt and 2 more; "
        f"raw text is tokenized with: phalanx data prepare {tmp_path} --out FOLDER"
    )


def test_a_text_file_is_sent_to_prepare(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("text")
    assert f"{path} is a file of no known format; raw text is tokenized with: phalanx data prepare" in refusal(path)


def test_a_folder_of_bodies_names_them(tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    write_megatron(tmp_path / "pairs" / "a")
    assert refusal(tmp_path / "pairs") == (
        f"{tmp_path}/pairs holds Megatron data; name the prefix of one pair: {tmp_path}/pairs/a"
    )
    write_tokens(tmp_path / "bodies" / "one")
    write_token_folder(tmp_path / "bodies" / "two", train_tokens=2000, validation_tokens=500)
    (tmp_path / "bodies" / "other").mkdir()
    assert refusal(tmp_path / "bodies") == (
        f"{tmp_path}/bodies holds no tokens itself; name one of: {tmp_path}/bodies/one, {tmp_path}/bodies/two"
    )
