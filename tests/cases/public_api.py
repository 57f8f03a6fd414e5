"""The public API: every module, name and signature."""

from __future__ import annotations

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
