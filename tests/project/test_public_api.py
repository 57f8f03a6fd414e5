"""The public API: names and signatures, docstrings with examples, errors that travel well."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import pickle
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_examples

import zcrecord
import zcrecord.compat.safetensors.flax
import zcrecord.compat.safetensors.numpy
import zcrecord.compat.safetensors.torch
import zcrecord.distributed
import zcrecord.embed
import zcrecord.fleet
import zcrecord.formats
import zcrecord.hollow
import zcrecord.integrity
import zcrecord.loaders
import zcrecord.onnx
import zcrecord.remote
import zcrecord.report
import zcrecord.transformers
import zcrecord.transport
import zcrecord.vllm
from zcrecord import errors
from zcrecord.compat import safetensors as compat

MODULES = {
    module: module.__name__
    for module in (
        zcrecord,
        compat,
        compat.flax,
        compat.numpy,
        compat.torch,
        zcrecord.distributed,
        zcrecord.embed,
        zcrecord.fleet,
        zcrecord.formats,
        zcrecord.hollow,
        zcrecord.integrity,
        zcrecord.loaders,
        zcrecord.onnx,
        zcrecord.remote,
        zcrecord.report,
        zcrecord.transformers,
        zcrecord.transport,
        zcrecord.vllm,
    )
}
CHANGED = """The public API is not what tests/project/test_public_api.py says it is.
Was that not meant? Give the new name a leading underscore, or the old one its place back.
Was it meant? Then take the change into PUBLIC, and into the documentation that shows it."""

# Functions and classes with their signatures, public methods, properties and attributes. For errors see `drawn`.
PUBLIC = """
zcrecord.ArchiveLayout(version: int, alignment: int, base_alignment: int, index_offset: int, index_nbytes: int,
    payload_offset: int, archive_nbytes: int, front: bool, sealed: bool, digest: str, deduplicated: int)
zcrecord.DType(code: int, name: str, bits: int, onnx: int | None, safetensors: str | None, torch: str | None,
    c: str | None, rust: str | None)
DType.numpy -> np.dtype[Any] | None
DType.packed -> bool
zcrecord.EditReport(source: str, dest: str, written: bool, tensors: int, archive_bytes: int, cloned_bytes: int,
    lapsed: tuple[str, ...], seconds: float)
zcrecord.LazyTensor(dtype: Any, shape: Sequence[int], produce: Callable[[], Any] | Iterable[Any], *,
    key: Hashable | None = None)
LazyTensor.key
LazyTensor.kind
LazyTensor.nbytes -> int
LazyTensor.pieces() -> Iterator[Any]
LazyTensor.shape
zcrecord.ModuleInfo(name: str, kind: str, type_name: str, tensors: int, nbytes: int, attributes: dict[str, Any])
zcrecord.PackedTensor(packed: Bytes, kind: DType | str, shape: tuple[int, ...])
PackedTensor.dtype -> np.dtype[Any]
PackedTensor.kind
PackedTensor.nbytes -> int
PackedTensor.pack(array: npt.NDArray[Any]) -> PackedTensor  # a class method
PackedTensor.packed
PackedTensor.shape
PackedTensor.unpack() -> npt.NDArray[Any]
zcrecord.Record(archive: Archive)
Record.archive -> Archive
Record.archive_nbytes -> int
Record.array(name: str) -> np.ndarray[Any, np.dtype[Any]]
Record.attributes -> dict[str, Any]
Record.close() -> bool
Record.content_digest(*, progress: Progress | None = None) -> str
Record.get(name: str, default: Any = None) -> Any
Record.hollow(*, sink: Any = None) -> Any
Record.info(name: str) -> TensorInfo
Record.infos() -> Iterator[TensorInfo]
Record.into(kind: type[T]) -> T
Record.items() -> Any
Record.jax(names: Names | None = None, *, shardings: Any = None) -> dict[str, Any]
Record.layout -> ArchiveLayout
Record.load_into(loader: Any, names: Names | None = None, **options: Any) -> dict[str, Any]
Record.metadata -> dict[str, Any]
Record.mode -> Mode
Record.module(name: str) -> Record
Record.modules -> dict[str, ModuleInfo]
Record.names -> tuple[str, ...]
Record.nbytes -> int
Record.path -> str | None
Record.prefetch(names: Names | None = None) -> None
Record.raw(name: str) -> memoryview
Record.select(names: Names | None = None, rename: Rename | None = None) -> Record
Record.torch(device: Any = 'cpu', names: Names | None = None, *, writable: bool = True) -> dict[str, Any]
Record.tree(tensors: Tensors = 'numpy', *, device: Any = None, like: Any = None) -> Any
Record.values() -> Any
Record.verify(*, progress: Progress | None = None) -> None
Record.walk() -> Iterator[tuple[int, str, Any]]
zcrecord.RecordEditor(path: str | os.PathLike[str], dest: str | os.PathLike[str] | None = None, *,
    force: bool = False, durable: bool = True, progress: Progress | None = None)
RecordEditor.attributes -> MutableMapping[str, Any]
RecordEditor.drop(names: Names) -> None
RecordEditor.metadata
RecordEditor.rename(old: str | re.Pattern[str] | Rename, new: str | None = None) -> None
RecordEditor.report
RecordEditor.tie(name: str, to: str) -> None
zcrecord.RecordError(message: str = '', *, path: str | None = None, tensor: str | None = None,
    offset: int | None = None)
RecordError.damage
RecordError.located(*, path: str | None = None, tensor: str | None = None, offset: int | None = None) -> RecordError
zcrecord.RecordWriter(dest: Any, *, alignment: int = 64, digest: str | None = 'xxh3', durable: bool = True,
    metadata: Mapping[str, Any] | None = None, max_shard_size: int | None = None, storage_options: Mapping[str,
    Any] | None = None)
RecordWriter.add(name: str | Sequence[str], value: Any) -> None
RecordWriter.attribute(name: str | Sequence[str], value: Any) -> None
RecordWriter.module(name: str | Sequence[str], kind: str = 'mapping', type_name: str = '') -> None
RecordWriter.parts(values: Iterable[Any]) -> list[Any]
RecordWriter.tensor(name: str | Sequence[str], dtype: Any, shape: Sequence[int], *, order: Literal['C',
    'F'] = 'C') -> Iterator[OpenTensor]
RecordWriter.tie(name: str | Sequence[str], to: str | Sequence[str]) -> None
zcrecord.SaveReport(tensors: int, payloads: int, payload_bytes: int, archive_bytes: int, tied: int,
    deduplicated: int)
zcrecord.StringTensor(data: Bytes, shape: tuple[int, ...], *, checked: bool = False)
StringTensor.data
StringTensor.dtype -> np.dtype[Any]
StringTensor.from_strings(strings: Iterable[str | bytes], shape: tuple[int,
    ...] | None = None) -> StringTensor  # a class method
StringTensor.nbytes -> int
StringTensor.shape
StringTensor.strings() -> Iterator[bytes]
StringTensor.unpack(encoding: str | None = 'utf-8') -> npt.NDArray[Any]
zcrecord.TensorInfo(name: str, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int,
    nbytes: int, alignment: int, payload: int | None, digest: int | None, tied: tuple[str, ...], bits: int,
    module: str)
zcrecord.edit(path: str | os.PathLike[str], dest: str | os.PathLike[str] | None = None, *, force: bool = False,
    durable: bool = True, progress: Progress | None = None) -> RecordEditor
zcrecord.load_record(source: Any, *, into: Any = None, names: Names | None = None, rename: Rename | None = None,
    mode: Mode = 'r', verify: Verify = 'index', mmap: bool = True, expect: str | None = None,
    embedded: Embedded | None = None, cache: Any = None, storage_options: Mapping[str, Any] | None = None) -> Any
zcrecord.save_record(record: Any, dest: Any, *, alignment: int = 64, digest: str | None = 'xxh3',
    durable: bool = True, metadata: Mapping[str, Any] | None = None, max_shard_size: int | None = None,
    progress: Progress | None = None, storage_options: Mapping[str, Any] | None = None) -> SaveReport
zcrecord.compat.safetensors.SafetensorError(message: str = '', *, path: str | None = None,
    tensor: str | None = None, offset: int | None = None)
RecordError.damage
RecordError.located(*, path: str | None = None, tensor: str | None = None, offset: int | None = None) -> RecordError
zcrecord.compat.safetensors.TensorSpec(*, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int)
zcrecord.compat.safetensors.deserialize(bytes: Any) -> list[tuple[str, dict[str, Any]]]
zcrecord.compat.safetensors.load(data: Any, framework: str = 'np', device: Any = 'cpu') -> dict[str, Any]
zcrecord.compat.safetensors.load_file(filename: str | os.PathLike[str], framework: str = 'np', device: Any = 'cpu',
    *, backend: str = 'mmap') -> dict[str, Any]
zcrecord.compat.safetensors.safe_open(filename: str | os.PathLike[str], framework: str, device: Any = 'cpu', *,
    backend: str = 'mmap')
safe_open.get_slice(name: str) -> Slice
safe_open.get_tensor(name: str) -> Any
safe_open.get_tensors() -> dict[str, Any]
safe_open.keys() -> list[str]
safe_open.metadata() -> dict[str, str] | None
safe_open.offset_keys() -> list[str]
zcrecord.compat.safetensors.save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes
zcrecord.compat.safetensors.save_file(tensors: Mapping[str, Any], filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None) -> None
zcrecord.compat.safetensors.serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str,
    str] | None = None) -> bytes
zcrecord.compat.safetensors.serialize_file(tensor_dict: Mapping[str, TensorSpec], filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None) -> None
zcrecord.compat.safetensors.flax.load(data: Any) -> dict[str, Any]
zcrecord.compat.safetensors.flax.load_file(filename: str | os.PathLike[str], *, backend: str = 'mmap') -> dict[str,
    Any]
zcrecord.compat.safetensors.flax.save(tensors: Mapping[str, Any], metadata: Mapping[str,
    str] | None = None) -> bytes
zcrecord.compat.safetensors.flax.save_file(tensors: Mapping[str, Any], filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None) -> None
zcrecord.compat.safetensors.numpy.load(data: Any) -> dict[str, Any]
zcrecord.compat.safetensors.numpy.load_file(filename: str | os.PathLike[str], *, backend: str = 'mmap') -> dict[str,
    Any]
zcrecord.compat.safetensors.numpy.save(tensor_dict: Mapping[str, Any], metadata: Mapping[str,
    str] | None = None) -> bytes
zcrecord.compat.safetensors.numpy.save_file(tensor_dict: Mapping[str, Any], filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None) -> None
zcrecord.compat.safetensors.torch.load(data: Any) -> dict[str, Any]
zcrecord.compat.safetensors.torch.load_file(filename: str | os.PathLike[str], device: Any = 'cpu', *,
    backend: str = 'mmap') -> dict[str, Any]
zcrecord.compat.safetensors.torch.load_model(model: Any, filename: str | os.PathLike[str], strict: bool = True,
    device: Any = 'cpu', *, backend: str = 'mmap') -> tuple[list[str], list[str]]
zcrecord.compat.safetensors.torch.save(tensors: Mapping[str, Any], metadata: Mapping[str,
    str] | None = None) -> bytes
zcrecord.compat.safetensors.torch.save_file(tensors: Mapping[str, Any], filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None) -> None
zcrecord.compat.safetensors.torch.save_model(model: Any, filename: str | os.PathLike[str], metadata: Mapping[str,
    str] | None = None, force_contiguous: bool = True) -> None
zcrecord.compat.safetensors.torch.storage_ptr(tensor: Any) -> int
zcrecord.compat.safetensors.torch.storage_size(tensor: Any) -> int
zcrecord.distributed.ZcrStorageReader(path: Any = None, *, verify: Literal['index', 'full'] = 'index',
    allow_pickle: bool = False, storage_options: Mapping[str, Any] | None = None)
zcrecord.distributed.ZcrStorageWriter(path: Any = None, *, durable: bool = True, digest: str | None = 'xxh3',
    alignment: int = 64, storage_options: Mapping[str, Any] | None = None)
zcrecord.distributed.consolidate(path: str | os.PathLike[str], dest: str | os.PathLike[str] | Binary, *,
    force: bool = False, alignment: int = 64, durable: bool = True, max_shard_size: int | None = None,
    progress: Progress | None = None, storage_options: Mapping[str, Any] | None = None) -> ConvertReport
zcrecord.distributed.load_views(path: Any, like: Mapping[str, Any], *, writable: bool = True,
    allow_pickle: bool = False, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]
zcrecord.embed.AttachReport(program: str, dest: str, program_bytes: int, archive_bytes: int, offset: int,
    replaced_bytes: int | None)
zcrecord.embed.DetachReport(program: str, dest: str | None, program_bytes: int, archive_bytes: int, exact: bool)
zcrecord.embed.EmbedReport(archive: str, lang: str, files: tuple[str, ...], tensors: int, nbytes: int, shared: int,
    empty: int, left_out: int, renamed: tuple[tuple[str, str], ...], repacked: tuple[str, ...], unplaced: tuple[str,
    ...])
zcrecord.embed.attach(program: Any, archive: Any, dest: Any = None, *, verify: Verify = 'full', force: bool = False,
    durable: bool = True, progress: Progress | None = None) -> AttachReport
zcrecord.embed.detach(program: Any, dest: Any = None, *, keep: bool = False, discard: bool = False,
    force: bool = False, durable: bool = True) -> DetachReport
zcrecord.embed.generate(source: Any, directory: Any, *, lang: Language, blob: BlobForm | None = None,
    assembly: bool = False, select: Patterns | None = None, exclude: Patterns | None = None,
    prefix: str | None = None, name: str | None = None, section: str | None = None, alignment: int | None = None,
    reader: bool = False, force: bool = False) -> EmbedReport
zcrecord.embed.reader_source(lang: str) -> bytes
zcrecord.fleet.Job(source: str, dest: str, source_format: str, nbytes: int = 0, alignment: int = 64,
    max_shard_size: int | None = None, durable: bool = True, force: bool = False, storage_options: Mapping[str,
    Any] = <factory>, dest_storage_options: Mapping[str, Any] = <factory>)
zcrecord.fleet.Outcome(job: Job, state: State, error: str = '', nbytes: int = 0, seconds: float = 0.0)
zcrecord.fleet.convert_one(job: Job) -> Outcome
zcrecord.fleet.plan(source_prefix: str | os.PathLike[str], dest_prefix: str | os.PathLike[str], *,
    source_format: str | None = None, alignment: int = 64, max_shard_size: int | None = None, durable: bool = True,
    force: bool = False, storage_options: Mapping[str, Any] | None = None, dest_storage_options: Mapping[str,
    Any] | None = None) -> list[Job]
zcrecord.formats.ConvertReport(source: str | None, dest: str | None, tensors: int, modules: int, renamed: int,
    payload_bytes: int, archive_bytes: int, input_bytes: int, shared_bytes: int, seconds: float,
    peak_rss: int | None, repeated_bytes: int = 0, left_out: int = 0, verified: bool = False, dry_run: bool = False,
    session_options: Mapping[str, str] = <factory>)
zcrecord.formats.FORMATS
zcrecord.formats.Format(name: str, title: str, suffixes: tuple[str, ...], starts: tuple[bytes, ...] = (),
    reads: bool = True, writes: bool = False, streams: bool = False, extra: str | None = None,
    advice: str = 'zcrecord convert makes an archive of it')
Format.advice
Format.extra
Format.name
Format.reads
Format.starts
Format.streams
Format.suffixes
Format.title
Format.writes
zcrecord.formats.convert(source: str | os.PathLike[str] | Binary, dest: str | os.PathLike[str] | Binary, *,
    source_format: str | None = None, dest_format: str | None = None, force: bool = False, alignment: int = 64,
    durable: bool = True, max_shard_size: int | None = None, metadata: Metadata | None = None,
    progress: Progress | None = None, storage_options: Mapping[str, Any] | None = None) -> ConvertReport
zcrecord.hollow.HollowRecord(skeleton: RecordSkeleton, sink: Sink | None)
HollowRecord.abort() -> None
HollowRecord.attributes -> dict[str, Any]
HollowRecord.fill_by(loader: Loader | str, source: Any = None, *, progress: Progress | None = None,
    cancel: Any = None, verify_digests: bool = True) -> None
HollowRecord.info(name: str) -> TensorInfo
HollowRecord.infos() -> Iterator[TensorInfo]
HollowRecord.metadata -> dict[str, Any]
HollowRecord.missing() -> list[str]
HollowRecord.modules -> dict[str, ModuleInfo]
HollowRecord.names -> tuple[str, ...]
HollowRecord.nbytes -> int
HollowRecord.nbytes_filled -> int
HollowRecord.open(name: str) -> ConstantWriter
HollowRecord.seal() -> Any
HollowRecord.set(name: str, data: Any) -> None
HollowRecord.state -> State
HollowRecord.stream(source: Any) -> None
zcrecord.hollow.hollow_of(source: Any, *, sink: Sink | None = None) -> HollowRecord
zcrecord.integrity.Change(what: Literal['tensor', 'module', 'attribute', 'metadata'], name: str,
    change: Literal['added', 'removed', 'type', 'contents', 'changed', 'moved'], before: Any = None,
    after: Any = None, elements: tuple[int, int] | None = None, largest: float | int | None = None)
zcrecord.integrity.SIGNATURE_PREFIX
zcrecord.integrity.SignReport(path: str, dest: str, key: str, content_digest: str, replaced: bool)
zcrecord.integrity.check_signature(record: Record, key: Any, *, progress: Progress | None = None) -> str
zcrecord.integrity.compare(before: Record, after: Record, *, fast: bool = False, progress: Callable[[int,
    int | None], None] | None = None) -> Iterator[Change]
zcrecord.integrity.is_encrypted_key(key: str | os.PathLike[str]) -> bool
zcrecord.integrity.make_signature(record: Record, key: Any, *, passphrase: bytes | None = None) -> tuple[str, str]
zcrecord.integrity.sign(path: str | os.PathLike[str], key: Any, dest: str | os.PathLike[str] | None = None, *,
    passphrase: bytes | None = None, force: bool = False, durable: bool = True,
    progress: Progress | None = None) -> SignReport
zcrecord.integrity.signed_message(key: str, digest: str) -> bytes
zcrecord.integrity.signers(record: Record) -> tuple[str, ...]
zcrecord.loaders.LoadPlan(refs: tuple[PayloadRef, ...], targets: dict[str, Target], max_in_flight: int,
    path: str | None = None, identity: tuple[int, ...] | None = None, advance: Callable[[int], None] = _nothing)
LoadPlan.advance(_: int) -> None
LoadPlan.unchecked -> tuple[str, ...]
zcrecord.loaders.Loader
Loader.abort() -> None
Loader.begin(plan: LoadPlan) -> None
Loader.can_load(device: str, dtype: DType) -> bool
Loader.finish() -> None
Loader.load(ref: PayloadRef, dst: Any | None = None) -> Any
zcrecord.loaders.PayloadRef(name: str, path: str | None, buffer: memoryview | None, source: RangeSource | None,
    offset: int, nbytes: int, dtype: DType, bits: int, shape: tuple[int, ...], strides: tuple[int, ...] | None,
    payload: int, byte_offset: int = 0, checked: bool = False)
PayloadRef.let_go(start: int, stop: int) -> None
PayloadRef.read_into(target: memoryview, start: int = 0) -> None
zcrecord.loaders.RangeSource
RangeSource.readinto_at(offset: int, target: memoryview) -> None
zcrecord.loaders.Target(ref: PayloadRef, view: PayloadRef | None)
Target.ref
Target.view
zcrecord.loaders.load_into(record: HasArchive | Archive, loader: Loader | str, names: Names | None = None, *,
    dst: Mapping[str, Any] | None = None, slices: Slices | None = None, max_in_flight: int = 67108864,
    raw: bool = False, progress: Progress | None = None, cancel: Cancel | None = None) -> dict[str, Any]
zcrecord.loaders.loader_for(device: str) -> Loader
zcrecord.loaders.plan_load(record: HasArchive | Archive, names: Names | None = None, *,
    slices: Slices | None = None, max_in_flight: int = 67108864, raw: bool = False) -> LoadPlan
zcrecord.loaders.shard(rank: int, world: int, axis: int = 0, *, uneven: bool = False) -> Callable[[int], slice]
zcrecord.onnx.ConvertReport(source: str | None, dest: str | None, tensors: int, modules: int, renamed: int,
    payload_bytes: int, archive_bytes: int, input_bytes: int, shared_bytes: int, seconds: float,
    peak_rss: int | None, repeated_bytes: int = 0, left_out: int = 0, verified: bool = False, dry_run: bool = False,
    session_options: Mapping[str, str] = <factory>)
zcrecord.onnx.ExternalReport(archive: str, content_digest: str, tensors: int, nbytes: int, full: bool)
zcrecord.onnx.OnnxTensorInfo(name: str, dtype: DType, shape: tuple[int, ...], file: str, offset: int | None,
    nbytes: int, field: str, copied: bool)
zcrecord.onnx.OnnxTensors(path: str, files: ModelFiles, names: list[str], entries: list[LocatedTensor], *,
    mmap: bool)
OnnxTensors.array(name: str) -> np.ndarray[Any, np.dtype[Any]]
OnnxTensors.close() -> bool
OnnxTensors.get(name: str, default: Any = None) -> Any
OnnxTensors.info(name: str) -> OnnxTensorInfo
OnnxTensors.infos() -> Iterator[OnnxTensorInfo]
OnnxTensors.load_all() -> dict[str, Any]
OnnxTensors.names -> tuple[str, ...]
OnnxTensors.nbytes -> int
OnnxTensors.path -> str
OnnxTensors.to_onnx(dest: str | os.PathLike[str], *, alignment: int = 1, force: bool = False,
    durable: bool = True) -> ConvertReport
zcrecord.onnx.TuneReport(source: str, dest: str, targets: tuple[str, ...], modules: tuple[str, ...], weights: int,
    packed: int, packed_bytes: int, input_bytes: int, archive_bytes: int, content_digest_before: str,
    content_digest: str, lapsed: tuple[str, ...], models: tuple[str, ...], verified: bool, seconds: float)
zcrecord.onnx.Tuning(used: bool, reason: str | None, targets: tuple[str, ...])
zcrecord.onnx.convert(source: str | os.PathLike[str] | Binary, dest: str | os.PathLike[str] | Binary, *,
    alignment: int = 64, force: bool = False, durable: bool = True, allow_links: bool = False,
    select: Patterns | None = None, exclude: Patterns | None = None, verify: bool = False, dry_run: bool = False,
    metadata: Metadata | None = None, progress: Progress | None = None, storage_options: Mapping[str,
    Any] | None = None) -> ConvertReport
zcrecord.onnx.fill_session(source: Any, *, module: str | None = None, loader: Loader | Mapping[str,
    Any] | str | None = None, sess_options: Any = None, providers: Sequence[Any] | None = None,
    provider_options: Sequence[Any] | None = None) -> Any
zcrecord.onnx.scan(path: str | os.PathLike[str], *, allow_links: bool = False, mmap: bool = True) -> OnnxTensors
zcrecord.onnx.session(source: Any, *, module: str | None = None, memory: Literal['shared', 'speed'] = 'shared',
    sess_options: Any = None, providers: Sequence[Any] | None = None,
    provider_options: Sequence[Any] | None = None) -> Any
zcrecord.onnx.to_onnx(source: str | os.PathLike[str] | Any, dest: str | os.PathLike[str] | Binary, *,
    module: str | None = None, external: bool = False, tuned: bool | None = None, force: bool = False,
    durable: bool = True, progress: Progress | None = None, storage_options: Mapping[str,
    Any] | None = None) -> ConvertReport
zcrecord.onnx.tune(archive: str | os.PathLike[str], dest: str | os.PathLike[str] | None = None, *,
    threads: int | None = None, verify: bool = False, force: bool = False, durable: bool = True,
    progress: Progress | None = None, storage_options: Mapping[str, Any] | None = None) -> TuneReport
zcrecord.onnx.tuning(source: Any, *, module: str | None = None) -> Tuning
zcrecord.onnx.untune(archive: str | os.PathLike[str], dest: str | os.PathLike[str] | None = None, *,
    force: bool = False, durable: bool = True, progress: Progress | None = None, storage_options: Mapping[str,
    Any] | None = None) -> TuneReport
zcrecord.onnx.verify_external(path: str | os.PathLike[str], *, full: bool = False, allow_links: bool = False,
    progress: Progress | None = None) -> ExternalReport
zcrecord.remote.trim_cache(folder: Any = None, *, limit: int = 0) -> int
zcrecord.report.PageReport(source: str | None, dest: str | None, tensors: int, modules: int, archive_bytes: int,
    html_bytes: int, content_digest: str | None, seconds: float, peak_rss: int | None)
zcrecord.report.describe_archive(record: Record, *, content_digest: str | None = None) -> dict[str, Any]
zcrecord.report.report(source: Any, dest: Any, *, digest: bool = False, force: bool = False, durable: bool = True,
    progress: Progress | None = None, storage_options: Mapping[str, Any] | None = None) -> PageReport
zcrecord.report.report_page(description: dict[str, Any]) -> bytes
zcrecord.transformers.from_pretrained(folder: Any, model_class: Any, *args: Any, archive: Any = None,
    **kwargs: Any) -> Any
zcrecord.transformers.save_pretrained(model: Any, folder: Any, *, max_shard_size: int | str | None = None,
    save_original_format: bool = True, durable: bool = True) -> SaveReport
zcrecord.transport.PackReport(source: str | None, dest: str | None, archive_bytes: int, packed_bytes: int,
    frames: int | None, seconds: float, peak_rss: int | None)
PackReport.ratio -> float
zcrecord.transport.pack(source: Any, dest: Any, *, level: int = 1, threads: int | None = None, force: bool = False,
    durable: bool = True, progress: Progress | None = None, storage_options: Mapping[str,
    Any] | None = None) -> PackReport
zcrecord.transport.unpack(source: Any, dest: Any, *, force: bool = False, durable: bool = True,
    threads: int | None = None, progress: Progress | None = None, storage_options: Mapping[str,
    Any] | None = None) -> PackReport
zcrecord.vllm.FORMAT
zcrecord.vllm.register() -> None
"""


class _Bare:
    """An annotation that prints as it was written."""

    def __init__(self, text: Any) -> None:
        self.text = str(text)

    def __repr__(self) -> str:
        return self.text


def signature(thing: Callable[..., Any]) -> str:
    """Return a signature with its annotations as the source has them; of a class, what calling it takes."""
    found = inspect.signature(thing)
    parameters = [p.replace(annotation=_Bare(p.annotation)) for p in found.parameters.values() if p.name != "self"]
    returned = found.empty if inspect.isclass(thing) else _Bare(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returned))


def members(kind: type) -> list[str]:
    """Return a line for each public thing that a class itself defines."""
    lines = []
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            lines.append(f".{name} -> {member.fget.__annotations__['return']}")
        elif isinstance(member, classmethod):
            lines.append(f".{name}{signature(getattr(kind, name))}  # a class method")
        elif inspect.isfunction(member):
            lines.append(f".{name}{signature(member)}")
        elif not dataclasses.is_dataclass(kind):
            lines.append(f".{name}")
    return [f"{kind.__name__}{line}" for line in lines]


def described() -> list[str]:
    """Return the public API as it is, in lines that fit the page."""
    lines = []
    for module, prefix in MODULES.items():
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if inspect.isclass(thing) and issubclass(thing, Exception) and thing is not zcrecord.RecordError:
                continue
            shown = signature(thing) if callable(thing) and not getattr(thing, "_is_protocol", False) else ""
            shown = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", shown)
            shown = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", shown)
            lines.append(f"{prefix}.{name}{shown}")
            lines += members(thing) if inspect.isclass(thing) else []
    wrap = functools.partial(textwrap.wrap, width=116, subsequent_indent="    ", break_on_hyphens=False)
    parts = [part for line in lines for part in wrap(re.sub("(?<!,) ", "\0", line))]  # only after a comma
    return [part.replace("\0", " ") for part in parts]


def test_public_names_have_the_signatures_that_are_promised() -> None:
    promised, found = PUBLIC.strip().splitlines(), described()
    changes = difflib.unified_diff(promised, found, "promised", "found", n=1, lineterm="")
    assert promised == found, "\n".join([CHANGED, *changes])


@pytest.mark.parametrize("module", MODULES, ids=MODULES.values())
def test_all_is_in_order_and_true(module: Any) -> None:
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name))  # constants first
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("module", [zcrecord, zcrecord.onnx], ids=lambda module: module.__name__)
def test_all_lists_every_public_name_of_a_package_that_only_gathers(module: Any) -> None:
    modules = {name for name, value in vars(module).items() if inspect.ismodule(value)}
    seen = (
        {name for name in vars(module) if not name.startswith("_")} - modules - {"annotations", "TYPE_CHECKING", "Any"}
    )
    assert seen <= set(module.__all__), f"public, but not in __all__: {sorted(seen - set(module.__all__))}"


def undocumented(path: Path) -> list[str]:
    """Return each public function, class and method without a docstring, of its own or of a method it overrides."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    documented = {node.name for node in definitions if ast.get_docstring(node)}
    public = [node for node in tree.body if node in definitions]
    public += [
        m for c in public if isinstance(c, ast.ClassDef) and c.name[0] != "_" for m in c.body if m in definitions
    ]
    named = [(node.name, node.lineno) for node in definitions if node in public and node.name[0] != "_"]
    return [f"{path.name}:{line} {name}" for name, line in named if name not in documented]


def test_everything_public_has_a_docstring() -> None:
    package = Path(zcrecord.__file__).parent
    paths = [path for path in package.rglob("*.py") if "_schema" not in path.parts]
    bare = [place for path in paths for place in undocumented(path)]
    assert not bare, bare


FUNCTIONS = [
    thing for module in MODULES for name in module.__all__ if inspect.isfunction(thing := getattr(module, name))
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_public_function_has_a_short_example_that_the_tests_run(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    assert "Example:" in text
    lines = re.findall(r"^\s*(?:>>>|\.\.\.) ", text, re.MULTILINE)
    assert 0 < len(lines) <= 6, f"{len(lines)} lines of example"
    assert f"{function.__module__}.{function.__name__}" in {example.name for example in test_examples.EXAMPLES}


# Errors.

KINDS = [kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)]
BRANCH = re.compile(r"(?P<indent>[ │]*)[├└]── (?P<name>\w+)(?:\((?P<builtin>\w+)\))?")


def drawn() -> dict[str, set[str]]:
    """Return each error of the drawing in errors.py with the bases it has there."""
    bases: dict[str, set[str]] = {}
    path = ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        if match := BRANCH.match(line.strip("\n").removeprefix("    ")):
            path = path[: len(match["indent"]) // 4 + 1]
            bases[match["name"]] = {path[-1], match["builtin"]} - {None}
            path.append(match["name"])
    return bases


def test_errors_form_the_tree_that_is_drawn() -> None:
    assert drawn() == {kind.__name__: {base.__name__ for base in kind.__bases__} for kind in KINDS}
    assert {kind.__name__ for kind in KINDS} <= set(zcrecord.__all__)


def an_error(kind: type[zcrecord.RecordError]) -> zcrecord.RecordError:
    """Return an error of this kind that says everything it can say."""
    if issubclass(kind, zcrecord.TensorNotFoundError):
        error: zcrecord.RecordError = kind("head.weigth", lambda: ["head.weight", "b"], path="dir/model.zcr")
    elif issubclass(kind, zcrecord.SourceError):
        error = kind("no such file", path="dir/model.zcr", tensor="head.weigth", errno=2)
    else:
        error = kind("is wrong; mend it", path="dir/model.zcr", tensor="head.weigth")
    return error.located(path="elsewhere", offset=0x40)


@pytest.mark.parametrize("protocol", ["copy", "deepcopy", *range(pickle.HIGHEST_PROTOCOL + 1)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_error_survives_copying_and_pickling(kind: type[zcrecord.RecordError], protocol: str | int) -> None:
    error = an_error(kind)
    again = getattr(copy, protocol) if isinstance(protocol, str) else lambda e: pickle.loads(pickle.dumps(e, protocol))
    other = again(error)
    assert type(other) is kind
    attributes = ["path", "tensor", "offset", "message", "args", *(["errno"] if isinstance(error, OSError) else [])]
    assert [getattr(other, name) for name in attributes] == [getattr(error, name) for name in attributes]
    assert (error.path, error.tensor, error.offset) == ("dir/model.zcr", "head.weigth", 0x40)
    assert str(other) == str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_error_says_where_and_what_in_one_line(kind: type[zcrecord.RecordError]) -> None:
    text = str(an_error(kind))
    assert text.startswith("dir/model.zcr: tensor 'head.weigth': ")
    if kind is zcrecord.TensorNotFoundError:
        assert text.endswith("not in this record; close names: 'head.weight'")
    assert str(kind()) is not None
    assert "\n" not in text


def test_names_from_strangers_cannot_forge_lines_or_flood_the_screen() -> None:
    text = str(zcrecord.FormatError("is wrong", path="a\nb\x1b[31m", tensor="x" * 100_000))
    assert "a\\nb\\x1b[31m" in text
    assert len(text) < 400


# Values.


@pytest.fixture
def record(tmp_path: Path) -> zcrecord.Record:
    zcrecord.save_record({"w": np.ones(3, np.float32), "m": {"s": 1}}, tmp_path / "m.zcr")
    return zcrecord.load_record(tmp_path / "m.zcr")


def test_reports_and_infos_are_frozen_values(record: zcrecord.Record, tmp_path: Path) -> None:
    report = zcrecord.save_record({"w": np.ones(3)}, tmp_path / "n.zcr")
    for value in (report, record.info("w"), record.modules["m"], record.info("w").dtype):
        assert dataclasses.is_dataclass(value)
        assert not hasattr(value, "__dict__")
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)


def test_public_types_have_slots(record: zcrecord.Record) -> None:
    packed = zcrecord.PackedTensor(np.zeros(2, np.uint8), "int4", (4,))
    for value in (record, packed, zcrecord.StringTensor.from_strings(["a"])):
        assert not hasattr(value, "__dict__")
        with pytest.raises(AttributeError):
            value.scratch = 1  # type: ignore[union-attr]


def test_record_attributes_cannot_be_set(record: zcrecord.Record) -> None:
    for name, member in vars(zcrecord.Record).items():
        if isinstance(member, property):
            with pytest.raises(AttributeError):
                setattr(record, name, None)
