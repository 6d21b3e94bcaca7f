import bz2
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from foreign_tokens import LISTS, encode, write_mds, write_tokens
from foreign_tokens import MDS_FLAT as FLAT
from phalanx.errors import DataError
from phalanx.families.language.data import mds as module
from phalanx.families.language.data.mds import MdsSource, is_mds, mds_split


@pytest.mark.parametrize(
    ("encoding", "size"),
    [("bytes", None), ("ndarray", None), ("ndarray:uint16", None), ("ndarray:int32", None), ("ndarray:uint16:4", 8)],
)
def test_reads_every_encoding_of_tokens(tmp_path: Path, encoding: str, size: int | None) -> None:
    source = MdsSource(write_tokens(tmp_path / "mds", encoding, size=size))
    assert source.tokens == 24
    assert (source.vocab_size, source.text_bytes, source.tokenizer, source.end_of_document) == (None,) * 4
    rows = source.read(np.array([0, 3, 6, 12]), 12)
    assert rows.dtype == np.int64
    assert rows.tolist() == [FLAT[0:12], FLAT[3:15], FLAT[6:18], FLAT[12:24]]
    assert source.document_of(np.array([[0, 3], [4, 23]])).tolist() == [[0, 0], [1, 5]]
    source.verify()


def test_reads_a_column_of_fixed_size_of_several_dims(tmp_path: Path) -> None:
    shards = [[{"tokens": encode(ids, "ndarray:uint16:2,2")} for ids in shard] for shard in LISTS]
    source = MdsSource(write_mds(tmp_path, shards, {"tokens": ("ndarray:uint16:2,2", 8)}))
    assert source.read(np.array([0]), 24).tolist() == [FLAT]


def test_bytes_may_be_of_another_type(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path, "bytes", dtype="int32")
    assert MdsSource(folder, bytes_dtype="int32").read(np.array([0]), 24).tolist() == [FLAT]
    with pytest.raises(DataError, match=r"shard\.00000\.mds: sample 0 holds token id 8589934593 when read as int64"):
        MdsSource(folder)


@pytest.mark.parametrize("first", ["bytes", "ndarray:int32"])
def test_other_columns_are_stepped_over(tmp_path: Path, first: str) -> None:
    columns: dict[str, tuple[str, int | None]] = {
        "label": ("int", 8),
        "text": ("str", None),
        "tokens": (first, None),
        "mask": ("pkl", None),
    }
    shards = [
        [
            {"label": bytes(8), "text": b"x" * (3 * i + j), "tokens": encode(ids, first), "mask": b"y" * j}
            for j, ids in enumerate(shard)
        ]
        for i, shard in enumerate(LISTS)
    ]
    source = MdsSource(write_mds(tmp_path, shards, columns))
    assert source.read(np.array([2]), 20).tolist() == [FLAT[2:22]]
    source.verify()


def test_takes_input_ids_or_the_only_array(tmp_path: Path) -> None:
    encoded = [[{"text": b"abc", "ids": encode(ids, "ndarray:uint16")} for ids in LISTS[0]]]
    only = write_mds(tmp_path / "only", encoded, {"text": ("str", None), "ids": ("ndarray:uint16", None)})
    assert MdsSource(only).read(np.array([0]), 8).tolist() == [FLAT[:8]]
    two = [[{"input_ids": encode(ids, "bytes"), "weights": encode([7], "ndarray:int32")} for ids in LISTS[0]]]
    named = write_mds(tmp_path / "named", two, {"input_ids": ("bytes", None), "weights": ("ndarray:int32", None)})
    assert MdsSource(named).read(np.array([0]), 8).tolist() == [FLAT[:8]]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_reading_equals_the_concatenation(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from(["bytes", "ndarray", "ndarray:uint16"]))
    around = st.sampled_from([1, 2, 127, 128, 255, 256, 257, 300])
    lengths = data.draw(st.lists(st.lists(around, min_size=0, max_size=4), min_size=1, max_size=4))
    flat = list(range(sum(map(sum, lengths))))
    left = iter(flat)
    lists = [[[next(left) for _ in range(length)] for length in shard] for shard in lengths]
    source = MdsSource(write_tokens(tmp_path_factory.mktemp("mds"), encoding, lists))
    assert source.tokens == len(flat)
    if flat:
        length = data.draw(st.integers(1, len(flat)))
        starts = data.draw(st.lists(st.integers(0, len(flat) - length), max_size=5))
        expected = [flat[start : start + length] for start in starts]
        assert source.read(np.array(starts, dtype=np.int64), length).tolist() == expected
        ends = np.cumsum([length for shard in lengths for length in shard])
        assert (np.diff(source.document_of(np.arange(len(flat)))) > 0).sum() == len(ends) - 1


def test_lists_longer_than_16_bits(tmp_path: Path) -> None:
    lists = [[list(range(65_535)), [i % 65_536 for i in range(65_537)]]]
    source = MdsSource(write_tokens(tmp_path, "ndarray:uint16", lists))
    assert source.tokens == 65_535 + 65_537
    assert source.read(np.array([65_534]), 3).tolist() == [[65_534, 0, 1]]


@pytest.mark.parametrize("name", ["validation", "valid", "val"])
def test_subfolders_are_splits(tmp_path: Path, name: str) -> None:
    write_tokens(tmp_path / "train")
    assert mds_split(tmp_path, "train") == tmp_path / "train"
    assert mds_split(tmp_path, "validation") is None
    write_tokens(tmp_path / name)
    write_tokens(tmp_path)  # an index over all subfolders, as merging writes it, does not hide the splits
    assert mds_split(tmp_path, "train") == tmp_path / "train"
    assert mds_split(tmp_path, "validation") == tmp_path / name


def test_without_subfolders_all_is_train(tmp_path: Path) -> None:
    assert not is_mds(tmp_path)
    write_tokens(tmp_path)
    assert is_mds(tmp_path)
    assert mds_split(tmp_path, "train") == tmp_path
    assert mds_split(tmp_path, "validation") is None


def test_shards_may_lie_in_subfolders(tmp_path: Path) -> None:
    write_tokens(tmp_path / "part")
    index = json.loads((tmp_path / "part" / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_data"]["basename"] = f"part/{shard['raw_data']['basename']}"
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert MdsSource(tmp_path).read(np.array([0]), 24).tolist() == [FLAT]


def test_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    same = [MdsSource(write_tokens(tmp_path / f"same-{i}")).fingerprint for i in range(2)]
    changed = [[list(ids) for ids in shard] for shard in LISTS]
    changed[2][0][0] += 1
    relengthened = [[[1, 2, 3], [4, 5, 6, 7, 8]], *LISTS[1:]]
    others = [
        MdsSource(write_tokens(tmp_path / "type", "ndarray:int16")).fingerprint,
        MdsSource(write_tokens(tmp_path / "changed", lists=changed)).fingerprint,
        MdsSource(write_tokens(tmp_path / "lengths", lists=relengthened)).fingerprint,
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 4


def test_fingerprint_sees_a_later_column_border(tmp_path: Path) -> None:
    columns: dict[str, tuple[str, int | None]] = {"text": ("str", None), "tokens": ("ndarray:uint16", None)}
    first = {"text": b"", "tokens": encode([1, 2], "ndarray:uint16")}

    def fingerprint(name: str, text: bytes, ids: list[int]) -> str:
        second = {"text": text, "tokens": encode(ids, "ndarray:uint16")}
        return MdsSource(write_mds(tmp_path / name, [[first, second]], columns)).fingerprint

    assert fingerprint("long", b"", [3, 4, 5]) != fingerprint("short", b"xx", [3, 4])


def in_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Damage that changes the second shard's record."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index["shards"][1])
        (folder / "index.json").write_text(json.dumps(index))

    return damage


def in_shard(at: int, content: bytes) -> Callable[[Path], None]:
    """Damage that writes over bytes of the second shard."""

    def damage(folder: Path) -> None:
        path = folder / "shard.00001.mds"
        old = path.read_bytes()
        at_byte = at if at >= 0 else len(old) + at
        path.write_bytes(old[:at_byte] + content + old[at_byte + len(content) :])

    return damage


def renamed(name: str) -> Callable[[Path], None]:
    return in_index(lambda shard: shard["raw_data"].update(basename=name))


def shortened(folder: Path) -> None:
    path = folder / "shard.00001.mds"
    path.write_bytes(path.read_bytes()[:-3])


def compressed(
    method: str,
    ending: str,
    *,
    pack: Callable[[bytes], bytes] = gzip.compress,
    cut: int = 0,
    more: bytes = b"",
) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "shard.00001.mds"
        packed = pack(path.read_bytes() + more)
        packed = packed[: len(packed) - cut]
        (folder / f"{path.name}.{ending}").write_bytes(packed)
        path.unlink()
        record = {"basename": f"{path.name}.{ending}", "bytes": len(packed), "hashes": {}}
        in_index(lambda shard: shard.update(compression=method, zip_data=record))(folder)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "index.json").unlink(), r"index\.json: No such file or directory; an MDS folder"),
        (lambda folder: (folder / "index.json").write_text("{"), r"index\.json: content: Invalid JSON"),
        (in_index(lambda s: s.update(version=1)), r"index\.json: shards\.1\.version: Input should be 2; only MDS"),
        (in_index(lambda s: s.update(format="jsonl")), r"index\.json: shards\.1\.format: Input should be 'mds'"),
        (in_index(lambda s: s.pop("samples")), r"index\.json: shards\.1\.samples: Field required"),
        (renamed("../shard.00001.mds"), r"basename: .*'\.\./shard\.00001\.mds' does not stay inside the folder"),
        (renamed("/etc/hostname"), r"basename: .*'/etc/hostname' does not stay inside the folder"),
        (renamed("a/../../b.mds"), r"does not stay inside the folder"),
        (renamed("C:\\b.mds"), r"does not stay inside the folder"),
        (renamed(""), r"does not stay inside the folder"),
        (renamed("gone.mds"), r"gone\.mds: No such file or directory; index\.json lists it with \d+ bytes"),
        (shortened, r"shard\.00001\.mds: (\d+) bytes found, \d+ expected; the file is truncated or altered"),
        (in_index(lambda s: s.update(samples=2)), r"00001\.mds: says it holds 1 samples, index\.json says 2"),
        (in_shard(4, b"\xff\xff"), r"shard\.00001\.mds: offsets of samples must rise"),
        (in_shard(8, b"\x00\x00"), r"shard\.00001\.mds: offsets of samples must rise"),
        (in_shard(-14, b"\x55"), r"shard\.00001\.mds: columns of \[85\] bytes in 10"),
        (in_shard(-10, b"\x08"), r"shard\.00001\.mds: sample 0: array of shape \[4, 9\] and uint16 in 7 bytes"),
        (in_shard(-9, b"\x05"), r"shard\.00001\.mds: sample 0: array of shape \[5\] and uint16 in 8 bytes"),
        (
            compressed("zstd:3", "zstd"),
            r"shard\.00001\.mds\.zstd: cannot be decompressed \(.*it is damaged: get it again",
        ),
        (
            compressed("gz", "gz", cut=9),
            r"shard\.00001\.mds\.gz: cannot be decompressed \(.*it is damaged: get it again",
        ),
        (compressed("gz", "gz", more=b"x"), r"shard\.00001\.mds\.gz: unpacks to more than \d+ bytes, \d+ expected"),
        (
            compressed("snappy", "snappy"),
            r"compressed \(snappy\).*decompress the shards once, each beside its original$",
        ),
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = write_tokens(tmp_path / "mds")
    damage(folder)
    with pytest.raises(DataError, match=message):
        MdsSource(folder)


@pytest.mark.parametrize(
    ("method", "pack"),
    [("zstd:3", zstandard.compress), ("gz:6", gzip.compress), ("bz2:9", bz2.compress)],
)
def test_compressed_shards_are_read_as_the_others(tmp_path: Path, method: str, pack: Callable[[bytes], bytes]) -> None:
    folder, plain = write_tokens(tmp_path / "mds"), write_tokens(tmp_path / "plain")
    ending = method.partition(":")[0]
    compressed(method, ending, pack=pack)(folder)
    source = MdsSource(folder)
    assert source.read(np.array([0]), 24).tolist() == MdsSource(plain).read(np.array([0]), 24).tolist() == [FLAT]
    source.verify()
    # Unpacked elsewhere: the folder itself stays as it is.
    assert not (folder / "shard.00001.mds").exists()


def test_a_decompressed_shard_is_read_though_the_index_names_the_compressed_one(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "mds")
    compressed("gz", "gz")(folder)
    packed = folder / "shard.00001.mds.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    assert MdsSource(folder).read(np.array([0]), 24).tolist() == [FLAT]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": ("pkl", None)}, r"column tokens has the encoding pkl: pickled columns are not read.*runs code"),
        ({"tokens": ("str", None)}, r"column tokens has the encoding str: tokens are read from bytes or ndarray"),
        ({"tokens": ("ndarray:float32", None)}, r"encoding ndarray:float32: tokens are read from .*integer TYPE"),
        ({"tokens": ("ndarray:uint16:x", None)}, r"encoding ndarray:uint16:x: tokens are read from"),
        ({"tokens": ("ndarray:uint16:4", 6)}, r"has the encoding ndarray:uint16:4 but the size 6"),
        ({"text": ("str", None)}, r"which column holds tokens\? found text \(str\); .*phalanx data prepare"),
        ({"a": ("ndarray", None), "b": ("ndarray", None)}, r"which column holds tokens\? found a \(ndarray\), b \(nda"),
    ],
)
def test_columns_without_readable_tokens_are_refused(
    tmp_path: Path, columns: dict[str, tuple[str, int | None]], message: str
) -> None:
    sample = {name: b"\x00" * (size or 6) for name, (_, size) in columns.items()}
    with pytest.raises(DataError, match=message):
        MdsSource(write_mds(tmp_path, [[sample]], columns))


def test_column_lists_must_agree(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path)
    in_index(lambda shard: shard["column_sizes"].append(4))(folder)
    with pytest.raises(DataError, match=r"index\.json: 1 column names, 1 encodings, 2 sizes"):
        MdsSource(folder)


def test_sizes_that_are_no_list_of_ids_are_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, [[{"tokens": bytes(12)}]], {"tokens": ("bytes", None)})
    with pytest.raises(DataError, match=r"sample 0: 12 bytes of tokens are no list of ids of one type"):
        MdsSource(folder)


@pytest.mark.parametrize("code", [34, 0])
def test_arrays_of_no_integer_type_are_refused(tmp_path: Path, code: int) -> None:
    sample = {"tokens": bytes([code, 1 << 2, 2]) + bytes(8)}
    with pytest.raises(DataError, match=rf"array of the unknown or non-integer type {code}"):
        MdsSource(write_mds(tmp_path, [[sample]], {"tokens": ("ndarray", None)}))


def test_a_later_array_of_another_type_is_refused_when_read(tmp_path: Path) -> None:
    kinds = ["int64", "int32", "int64"]
    samples = [{"tokens": encode([1, 2, 3, 4], "ndarray", kind)} for kind in kinds]
    source = MdsSource(write_mds(tmp_path, [samples], {"tokens": ("ndarray", None)}))
    assert source.read(np.array([0]), 4).tolist() == [[1, 2, 3, 4]]
    with pytest.raises(DataError, match=r"shard\.00000\.mds: sample 1 holds 4 tokens, 2 expected from its size"):
        source.read(np.array([2]), 4)


@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "blake2s"])
def test_verify_compares_the_hashes_of_the_index(tmp_path: Path, algorithm: str) -> None:
    folder = write_tokens(tmp_path, hashes=(algorithm,))
    MdsSource(folder).verify()
    in_shard(-1, b"\x07")(folder)
    with pytest.raises(DataError, match=rf"shard\.00001\.mds: {algorithm} \w+ found, \w+ expected; the file was alt"):
        MdsSource(folder).verify()


def with_xxhash(folder: Path, value: str) -> Path:
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_data"]["hashes"] = {"xxh64": value}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_xxhash_is_compared_where_its_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any hash stands in for the package's: what is compared, and when, is ours.
    monkeypatch.setattr(module, "_import_xxhash", lambda: SimpleNamespace(xxh64=hashlib.sha1))
    folder = write_tokens(tmp_path, lists=[[[1, 2, 3]]])
    whole = hashlib.sha1((folder / "shard.00000.mds").read_bytes()).hexdigest()
    source = MdsSource(with_xxhash(folder, whole))
    source.verify()
    assert source.unchecked is None
    with pytest.raises(DataError, match=r"shard\.00000\.mds: xxh64 \w+ found, 0000 expected; the file was altered"):
        MdsSource(with_xxhash(folder, "0000")).verify()


def test_what_hashes_cannot_tell_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_import_xxhash", lambda: None)
    assert MdsSource(write_tokens(tmp_path / "a", hashes=("sha256",))).unchecked is None
    folder = write_tokens(tmp_path / "b")
    assert MdsSource(folder).unchecked == (
        "3 of 3 shards have no hash in index.json: an id changed in place is not noticed"
    )
    assert MdsSource(with_xxhash(folder, "0000")).unchecked == (
        "3 of 3 shards have no hash but xxh64, which needs the package xxhash (pip install xxhash)"
    )


def test_verify_without_usable_hashes_decodes_every_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_import_xxhash", lambda: None)
    lists = [[[1, 2], [3, -4]]]
    folder = write_tokens(tmp_path, "ndarray:int32", lists)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"xxh64": "0" * 16}
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"shard\.00000\.mds: sample 1 holds token id -4; the file was altered"):
        MdsSource(folder).verify()
