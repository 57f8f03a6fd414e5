"""A view keeps its source alive: it outlives the record, the `with` block, `del` and the file.

Cases that could read memory that is gone run in a Python of their own.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import PackedTensor, StringTensor, UnsupportedError
from zcrecord.archive.archive import Archive

LINUX = sys.platform == "linux"
START = """
import gc, mmap, os, sys
import numpy as np
import zcrecord
path = sys.argv[1]

def load():
    return zcrecord.load_record(path)

def read():
    with open(path, 'rb') as file:
        return file.read()

def mapped():
    with open("/proc/self/maps") as lines:
        return any(path in line for line in lines)

def released(rec):
    assert rec.close() is True and not mapped()

def check(view):
    gc.collect()
    junk = [bytearray(1 << 20) for _ in range(8)]
    assert view.tolist() == list(range(1000)), view
"""
OUTLIVES = {
    "the with block": "with load() as rec: view = rec['w']\ncheck(view)",
    "close": "rec = load(); view = rec['w']; assert rec.close() is False; check(view)",
    "del": "rec = load(); view = rec['w']; del rec; check(view)",
    "the file": "view = load()['w']; os.unlink(path); check(view)",
    "the file, overwritten": "view = load()['w']; zcrecord.save_record({'w': np.zeros(1000)}, path); check(view)",
    "values": "rec = load(); view = list(rec.values())[0]; rec.close(); del rec; check(view)",
    "raw": "rec = load(); raw = rec.raw('w'); rec.close(); del rec; check(np.frombuffer(raw, np.int64))",
    "packed": "rec = load(); p = rec['p']; rec.close(); del rec; assert p.unpack().astype(int).tolist() == [1, -2, 3]",
    "strings": "rec = load(); s = rec['s']; rec.close(); del rec; assert list(s) == [b'a', b'bc']",
    "attributes": "rec = load(); b = rec.attributes['b']; rec.close(); del rec; assert bytes(b) == b'blob'",
    "metadata": "rec = load(); b = rec.metadata['b']; rec.close(); del rec; assert bytes(b) == b'more'",
    "touch": "rec = zcrecord.load_record(path, verify='touch'); view = rec['w']; rec.close(); del rec; check(view)",
    "a source of bytes": "view = zcrecord.load_record(read())['w']; check(view)",
    "a memoryview's release": """
data = read()
source = memoryview(data)
view = zcrecord.load_record(source)['w']
source.release()
del data, source
check(view)""",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    packed = zcrecord.PackedTensor.pack(np.array([1, -2, 3]).astype("int4"))
    turned = np.arange(6).reshape(2, 3).T
    tree = {"w": np.arange(1000), "p": packed, "s": np.array(["a", "bc"]), "t": turned, "b": b"blob"}
    zcrecord.save_record(tree, tmp_path / "m.zcr", metadata={"b": b"more"})
    return tmp_path / "m.zcr"


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("what", OUTLIVES)
def test_view_outlives(what: str, path: Path) -> None:
    r.run_python(START + OUTLIVES[what], path)


HELD = {
    "mmap": """
with open(path, 'rb') as file:
    source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
release = source.close""",
    "bytearray": """
source = bytearray(read())
release = lambda: source.extend(bytes(1 << 20))""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["view", "record"])
@pytest.mark.parametrize("source", HELD)
def test_source_cannot_be_released_or_resized_while_it_is_used(source: str, kind: str, path: Path) -> None:
    code = """
rec = zcrecord.load_record(source)
view = rec['w']
if KIND == 'view':
    rec.close(); del rec
else:
    del view; gc.collect()
try:
    release()
except BufferError:
    pass
else:
    raise SystemExit('the memory under the views was released')
if KIND == 'view':
    check(view); del view
else:
    check(rec['w']); rec.close()
release()
"""
    r.run_python(START + HELD[source] + code.replace("KIND", repr(kind)), path)


CLOSES = {
    "says True when nothing holds the mapping": "rec = load(); len(rec); released(rec)",
    "says the truth the second time": """
rec = load(); view = rec['w']
assert not rec.close() and not rec.close() and mapped()
check(view); del view; released(rec)""",
    "lets the last view take the mapping along": """
rec = load(); a, b = rec['w'], rec['w'][1:]; rec.close()
del rec, a; assert mapped()
del b; gc.collect(); assert not mapped()""",
    "is not needed": "rec = load(); rec['w']; del rec; gc.collect(); assert not mapped()",
    "counts what was asked before": """
rec = load(); list(rec), list(rec.items()), 'w' in rec
rec.verify(), rec.content_digest(), rec.tree(), rec.modules, rec.attributes, rec.metadata, rec.info('w'), rec.nbytes
released(rec)""",
    "lets go of what many lookups prepared": """
rec = load(); seen = [rec['w'].size + rec.get('t').size for _ in range(100)]; released(rec)""",
    "by another thread, while all views are prepared, leaves none of that": """
from zcrecord.archive.archive import Archive
rec, original, seen = load(), Archive.layout_of, []
def closing(archive, *form):
    found = original(archive, *form)
    seen.append(form)
    if len(seen) == 4:  # the last tensor
        rec.close()
    return found
Archive.layout_of = closing
try:
    list(rec.values())
except zcrecord.UnsupportedError as error:
    assert 'the record is closed' in str(error)
assert len(seen) == 4
assert not mapped()""",
    "says True for bytes, of which nothing is mapped": """
rec = zcrecord.load_record(read()); view = rec['w']; released(rec); check(view)""",
}


@pytest.mark.slow
@pytest.mark.exhaustive(keep=5)
@pytest.mark.skipif(not LINUX, reason="platform: only Linux lists what is mapped")
@pytest.mark.parametrize("what", CLOSES)
def test_close(what: str, path: Path) -> None:
    r.run_python(START + CLOSES[what], path)


@pytest.mark.slow
def test_failed_load_leaves_no_mapping_and_no_open_file(path: Path) -> None:
    code = """
data = bytearray(read())
data[100] ^= 1
with open(path, 'wb') as file:
    file.write(data)
before = len(os.listdir('/proc/self/fd')) if os.path.exists('/proc/self/fd') else 0
for verify in ('index', 'full'):
    try:
        load()
    except zcrecord.FormatError:
        pass
    else:
        raise SystemExit('loaded')
gc.collect()
if before:
    assert len(os.listdir('/proc/self/fd')) == before
    assert not mapped()
"""
    r.run_python(START + code, path)


FALLBACK = """
from zcrecord.storage import memory as mapping
before = len(os.listdir('/proc/self/fd'))
HINDER
for mode in 'rc':
    rec = zcrecord.load_record(path, mode=mode)
    check(rec['w'])
    assert mapped() and rec.close() is True and not mapped()
assert len(os.listdir('/proc/self/fd')) == before
"""
HINDERED = {
    "there is no ctypes": "sys.modules['ctypes'] = None",
    "the C library's mmap is not found": "import ctypes; ctypes.CDLL = lambda name: object()",
    "it fails": "mapping._c_mmap = lambda: lambda *arguments: (1 << 64) - 1",
}


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="platform: elsewhere nothing is mapped over")
@pytest.mark.parametrize("how", HINDERED)
def test_a_file_is_mapped_with_a_descriptor_where_it_cannot_be_without(how: str, path: Path) -> None:
    r.run_python(START + FALLBACK.replace("HINDER", HINDERED[how]), path)


@pytest.mark.parametrize("verify", ["touch", "index"])
@pytest.mark.parametrize("method", ["values", "items", "infos", "walk"])
def test_iterating_over_a_record_closed_meanwhile_is_refused_in_one_line(method: str, verify: Any, path: Path) -> None:
    rec = zcrecord.load_record(path, verify=verify)
    begun = iter(getattr(rec, method)())
    rec.close()
    with pytest.raises(UnsupportedError, match=r"m\.zcr: the record is closed; views taken before stay valid"):
        list(begun)


@pytest.mark.parametrize("call", ["row", "shape", "strides", "payload"])
@pytest.mark.parametrize("name", ["w", "p", "s", "t"])
def test_lookup_while_another_thread_closes_gives_the_tensor_or_one_error(
    name: str, call: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = zcrecord.load_record(path)
    expected = r.patterns(rec[name]) if name in "wt" else bytes(rec.raw(name))
    original = getattr(Archive, call)

    def closing(archive: Archive, *args: Any) -> Any:
        found = original(archive, *args)
        rec.close()
        return found

    monkeypatch.setattr(Archive, call, closing)
    try:
        got = rec[name]
    except UnsupportedError as error:
        assert "the record is closed" in str(error)
    else:
        assert expected == (r.patterns(got) if name in "wt" else bytes(got.packed if name == "p" else got.data))


# Views lie where the source does.


LARGE = 1 << 20
TREE = {
    **{d.name: r.filled(d, (3, 5)) for d in r.NUMERIC},
    "large": np.arange(LARGE // 8),
    "f_order": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "rank0": np.array(1.5),
    "strings": np.array(["a", "bc"]),
    "nothing": np.zeros((0, 3)),
    "blob": b"attribute",
    "m": {"blobs": [b"x", b"yz"]},
}


def written(data: bytes, folder: Path) -> Path:
    (folder / "written").write_bytes(data)
    return folder / "written"


def mapped(data: bytes, folder: Path) -> mmap.mmap:
    with open(written(data, folder), "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


SOURCES: dict[str, Callable[[bytes, Path], Any]] = {
    "bytes": lambda data, _: data,
    "bytearray": lambda data, _: bytearray(data),
    "memoryview": lambda data, _: memoryview(data),
    "slice of a memoryview": lambda data, _: memoryview(bytearray(b"x" * 64 + data + b"y"))[64:-1],
    "odd slice of a memoryview": lambda data, _: memoryview(b"xyz" + data)[3:],
    "mmap": mapped,
    "numpy uint8": lambda data, _: np.frombuffer(data, np.uint8).copy(),
    "numpy bfloat16": lambda data, _: np.frombuffer(data, r.WHOLE[10].numpy),
    "numpy memmap": lambda data, folder: np.memmap(written(data, folder), np.uint8),
    "array": lambda data, _: array.array("Q", data),
    "ctypes": lambda data, _: ctypes.create_string_buffer(data, len(data)),
}


def held_bytes(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(value, PackedTensor):
        return value.packed
    if isinstance(value, StringTensor):
        return value.data
    return np.frombuffer(value, np.uint8) if isinstance(value, memoryview) else value


def start_of(source: Any) -> int:
    return r.address(source if isinstance(source, np.ndarray) else np.frombuffer(source, np.uint8))


@pytest.mark.parametrize("verify", ["touch", "index", "full"])
@pytest.mark.parametrize("name", SOURCES)
def test_every_view_lies_in_its_source_where_info_says(name: str, verify: Any, tmp_path: Path) -> None:
    data = r.saved(TREE)
    source = SOURCES[name](data, tmp_path)
    start = start_of(source)
    rec = zcrecord.load_record(source, verify=verify)
    for key, value in rec.items():
        info = rec.info(key)
        if not info.nbytes:
            continue
        assert r.address(held_bytes(value)) == start + info.offset, key
        assert held_bytes(rec[key]).nbytes == info.nbytes, key
    for blob in (rec.attributes["blob"], *rec.attributes["m.blobs"]):
        assert 0 < r.address(held_bytes(blob)) - start < len(data) - 64
    r.assert_same(rec.tree(), TREE)


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_views_made_for_many_are_those_made_for_one(mode: Any, part: bool, tmp_path: Path) -> None:
    base, same = np.arange(24.0).reshape(4, 6), np.ones(9)
    tree = TREE | {"base": base, "cols": base[:, 1:3], "back": base[::-1, ::-2].T, "one": same, "equal": same.copy()}
    rec = zcrecord.load_record(written(r.saved(tree), tmp_path), mode=mode, names="*" if part else None)
    ones = [rec.archive.view(i) for i in range(len(rec))]
    for many in ([rec[name] for name in list(rec) * 3][-len(rec) :], list(rec.values())):
        for name, one, other in zip(rec, map(held_bytes, ones), map(held_bytes, many), strict=True):
            assert one is not other, name
            assert (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype), name
            assert one.flags.writeable == other.flags.writeable, name
            assert r.address(one) == r.address(other) or not one.size, name


def test_every_view_lies_in_the_mapping_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record(TREE, path)
    rec = zcrecord.load_record(path)
    (start,) = {r.address(held_bytes(v)) - rec.info(n).offset for n, v in rec.items() if n != "nothing"}
    assert ctypes.string_at(start, rec.archive_nbytes) == path.read_bytes()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("platform: only Linux lists what is mapped")
    (line,) = (line for line in maps.read_text(encoding="utf-8").splitlines() if line.endswith(str(path)))
    lo, hi = (int(end, 16) for end in line.split()[0].split("-"))
    assert lo <= start and start + rec.archive_nbytes <= hi


@pytest.mark.parametrize("name", SOURCES)
def test_views_are_read_only_whatever_the_source(name: str, tmp_path: Path) -> None:
    rec = zcrecord.load_record(SOURCES[name](r.saved(TREE), tmp_path))
    for view in [held_bytes(v) for v in (*rec.values(), *map(rec.get, rec))]:
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    assert rec.raw("float32").readonly
    assert rec.attributes["blob"].readonly


@pytest.mark.parametrize("others", [b"", b"x", b"executable" * 999, bytes(4096)], ids=len)
@pytest.mark.parametrize("embedded", ["prefix", "suffix"])
def test_archive_among_other_bytes_is_loaded_without_a_copy(others: bytes, embedded: Any, tmp_path: Path) -> None:
    data = r.saved(TREE) + others if embedded == "prefix" else others + r.saved(TREE)
    (tmp_path / "program").write_bytes(data)
    for source in (tmp_path / "program", memoryview(b"head" * 16 + data)[64:]):
        rec = zcrecord.load_record(source, embedded=embedded)
        r.assert_same(rec.tree(), TREE)
        for name in ("int32", "large"):
            info = rec.info(name)
            assert data[info.offset : info.offset + info.nbytes] == rec[name].tobytes()
    assert r.address(rec["int32"]) == start_of(source) + rec.info("int32").offset
