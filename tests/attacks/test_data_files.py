"""Data files that lie about their contents: headers of petabytes, Python objects, bombs, damaged archives.

Each file is small on disk. Each must end in a `DataError` that names the file and the array, and reading it must never
allocate more than the file's own size justifies.
"""

import gzip
import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyfed.core.errors import DataError
from polyfed.data.media import Clip, Image
from polyfed.data.reading.array_files import Arrays, read_idx, read_npy
from polyfed.data.sources import Npz
from polyfed.data.sources.pictures.picture_files import read_picture
from refusals import refuses

PIB = 1 << 50
MODEST = 64 << 20
"""Bytes that reading a small crafted file may allocate at most."""


def header(descr: str, shape: str, version: int = 1, order: str = "False") -> bytes:
    """A .npy header that numpy itself would never write."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text = text.ljust(118 if len(text) < 118 else len(text) + 1) + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as opened:
        for name, content in members.items():
            opened.writestr(f"{name}.npy", content)
    return path


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    return content.getvalue()


@pytest.fixture(autouse=True)
def _no_large_allocation() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MODEST, f"reading a crafted file allocated {peak:,} bytes"


LIES = {
    "4 PiB of doubles": header("'<f8'", f"({4 * PIB // 8},)"),
    "4 PiB in rows": header("'<f8'", f"({PIB // 8}, 4)"),
    "more than 64 bits": header("'<f8'", f"({1 << 40}, {1 << 40})"),
    "wraps around to 8 bytes": header("'<f8'", f"({(1 << 64) + 1},)"),
    "a sample too wide": header(f"('<f8', ({PIB},))", "(2,)"),
    "strings of 1 GiB": header("'<U268435456'", "(4,)"),
    "4 PiB in version 2": header("'<f8'", f"({4 * PIB // 8},)", version=2),
    "4 PiB in version 3": header("'<f8'", f"({4 * PIB // 8},)", version=3),
    "negative length": header("'<f8'", "(-8,)"),
    "a length of True": header("'<f8'", f"(True, {PIB})"),
    "items of no bytes": header("'|V0'", f"({PIB},)"),
    "nested beyond the parser": header("'<f8'", "(" * 5000 + ")" * 5000),
    "no dictionary": header("'<f8'", "(1,)").replace(b"{", b"["),
    "a torn header": header("'<f8'", "(1,)")[:20],
    "a header of 4 GiB": b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFFF) + b" " * 64,
    "version 9": b"\x93NUMPY\x09\x00" + header("'<f8'", "(1,)")[8:],
    "an unknown type": header("'<q99'", "(1,)"),
    "a broken Python 2 header": header("'<f8'", "((3L, '''")[:-2],
    "not an array": b"hello",
    "empty": b"",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_header_in_an_npz_is_refused_by_name(tmp_path: Path, lie: bytes) -> None:
    path = archive(tmp_path / "mine.npz", {"text": lie + b"\0" * 64, "label": npy(np.zeros(4, int))})
    with refuses(DataError, "array 'text'"):
        Arrays(path)["text"]
    with refuses(DataError, "array 'text'"):
        Npz(path=str(path), modalities=("text",)).load()
    with refuses(DataError, "array 'text'"):
        Npz(path=str(path), modalities=("label",), label="text").load()


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_header_in_a_folder_is_refused_by_name(tmp_path: Path, lie: bytes) -> None:
    (tmp_path / "text.npy").write_bytes(lie + b"\0" * 64)
    with refuses(DataError, "array 'text'"):
        Arrays(tmp_path)["text"]
    with refuses(DataError, "text.npy'"):
        read_npy(tmp_path / "text.npy")


def test_object_arrays_are_refused_without_unpickling(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    content = npy(np.array([Trap()], dtype=object))
    path = archive(tmp_path / "mine.npz", {"text": content})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text.npy").write_bytes(content)
    fields = header("[('x', '|O')]", "(1,)")
    nested = archive(tmp_path / "fields.npz", {"text": fields + content[-64:]})
    for place in (path, tmp_path / "folder", nested):
        with refuses(DataError, "unpickles"):
            Arrays(place)["text"]
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest header of 1 GiB of zeros, and the zeros, in about 1 MiB: the most that deflate can do."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.npz"
    rows = 1 << 30
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as opened:
        opened.writestr("label.npy", header("'|u1'", "(3,)") + bytes(3))
        with opened.open("text.npy", "w", force_zip64=True) as member:
            member.write(header("'|u1'", f"({rows}, 1)"))
            for _ in range(64):
                member.write(bytes(rows // 64))
    return path


def test_a_zip_bomb_is_refused_before_it_expands(bomb: Path) -> None:
    assert bomb.stat().st_size < 8 << 20
    with refuses(DataError, "would expand"):
        Arrays(bomb)["text"]
    with refuses(DataError, "would expand"):
        Npz(path=str(bomb), modalities=("text",)).load()


def test_data_that_compresses_well_is_read(tmp_path: Path) -> None:
    sparse = np.zeros((1000, 1000), np.uint8)
    np.savez_compressed(tmp_path / "sparse.npz", text=sparse)
    np.testing.assert_array_equal(Arrays(tmp_path / "sparse.npz")["text"], sparse)


def test_sizes_in_the_directory_of_a_zip_are_not_trusted(tmp_path: Path) -> None:
    content = header("'|u1'", f"({1 << 31}, 1)")
    path = archive(tmp_path / "mine.npz", {"text": content})
    raw = bytearray(path.read_bytes())
    directory = raw.index(b"PK\x01\x02")
    raw[directory + 24 : directory + 28] = struct.pack("<I", (1 << 31) + 200)  # size, uncompressed
    path.write_bytes(raw)
    with refuses(DataError, "would expand"):
        Arrays(path)["text"]
    raw[directory + 20 : directory + 24] = struct.pack("<I", (1 << 31) + 200)  # size, compressed
    path.write_bytes(raw)
    with refuses(DataError, "claims 2,147,483,848 bytes"):
        Arrays(path)["text"]


def test_encrypted_members_are_refused(tmp_path: Path) -> None:
    raw = bytearray(archive(tmp_path / "mine.npz", {"text": npy(np.zeros((4, 2)))}).read_bytes())
    for start in (raw.index(b"PK\x03\x04") + 6, raw.index(b"PK\x01\x02") + 8):  # flags
        raw[start] |= 1
    (tmp_path / "mine.npz").write_bytes(raw)
    with refuses(DataError, "'text' is damaged"):
        Arrays(tmp_path / "mine.npz")["text"]


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 93])
def test_compressions_that_numpy_never_writes_are_refused(tmp_path: Path, method: int) -> None:
    """The header of an LZMA stream chooses the size of the decoder's memory, up to 4 GiB."""
    raw = bytearray(archive(tmp_path / "mine.npz", {"text": npy(np.zeros((4, 2)))}).read_bytes())
    for start in (raw.index(b"PK\x03\x04") + 8, raw.index(b"PK\x01\x02") + 10):
        raw[start : start + 2] = struct.pack("<H", method)
    (tmp_path / "mine.npz").write_bytes(raw)
    with refuses(DataError, f"by method {method}"):
        Arrays(tmp_path / "mine.npz")["text"]


def test_a_garbled_deflated_member_is_refused(tmp_path: Path) -> None:
    content = npy(np.random.default_rng(0).normal(size=(400, 2)))
    path = archive(tmp_path / "mine.npz", {"text": content}, zipfile.ZIP_DEFLATED)
    good = path.read_bytes()
    for place in range(60, len(good) - 120, 97):
        raw = bytearray(good)
        raw[place] ^= 0x5A
        path.write_bytes(raw)
        with refuses(DataError, "'text' is damaged"):
            Arrays(path)["text"]


def test_any_flipped_byte_of_an_archive_is_a_data_error_or_harmless(tmp_path: Path) -> None:
    rows = np.arange(8)
    members = {"text": npy(rows[:, None] * 1.0), "label": npy(rows % 2), "label_name": npy(np.array(["no", "yes"]))}
    good = archive(tmp_path / "mine.npz", members).read_bytes()
    refused = 0
    for place in range(len(good)):
        raw = bytearray(good)
        raw[place] ^= 0x81
        (tmp_path / "mine.npz").write_bytes(raw)
        try:
            Npz(path=str(tmp_path / "mine.npz"), modalities=("text",)).load()
        except DataError:
            refused += 1
    assert refused > len(good) / 2


def test_names_of_classes_that_are_no_names_are_refused(tmp_path: Path) -> None:
    given = {"text": npy(np.zeros((4, 2))), "label": npy(np.zeros(4, int))}
    for wrong in (np.array("x"), np.zeros((2, 2), int), np.array([0.5]), np.array([b"\xff\xfe"])):
        path = archive(tmp_path / "mine.npz", given | {"label_name": npy(wrong)})
        with refuses(DataError, "array 'label_name'"):
            Npz(path=str(path), modalities=("text",)).load()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(1 << 31, 1 << 20, 1 << 4), (0xFFFFFFFF,), (1,) * 200, ()], ids=str)
def test_an_idx_file_that_claims_too_much_is_refused(tmp_path: Path, shape: tuple[int, ...], suffix: str) -> None:
    raw = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + b"\0"
    path = tmp_path / f"train{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    with refuses(DataError, f"train{suffix}' is"):
        read_idx(path)


def test_a_gzip_bomb_behind_a_small_header_is_not_expanded(tmp_path: Path) -> None:
    deflate = zlib.compressobj(9, wbits=31)
    content = deflate.compress(bytes([0, 0, 8, 1]) + struct.pack(">I", 3))
    for _ in range(256):
        content += deflate.compress(bytes(1 << 20))
    (tmp_path / "train.gz").write_bytes(content + deflate.flush())
    with refuses(DataError, "cut short"):
        read_idx(tmp_path / "train.gz")


def test_a_picture_that_claims_gigapixels_is_refused(tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    path = tmp_path / "large.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    with refuses(DataError, "not a picture"):
        read_picture(path)
    with refuses(DataError, "a whole image"):
        Image()(Clip.at(path))
