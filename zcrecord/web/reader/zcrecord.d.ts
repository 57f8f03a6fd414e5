// SPDX-License-Identifier: 0BSD
// For TypeScript 5.7 and later, whose typed arrays have a type parameter for their buffer.

/** A source of an archive. In Node, Bun and Deno other strings than URLs are paths; a FileHandle is read by ranges. */
export type Source = string | URL | Blob | ArrayBuffer | ArrayBufferView<ArrayBuffer> | FileHandleLike;

/** Memory that threads may share; views over it are SharedArrayBuffer-backed. */
export type SharedSource = SharedArrayBuffer | ArrayBufferView<SharedArrayBuffer>;

/** The used part of Node's FileHandle. */
export interface FileHandleLike {
  readonly fd: number;
  read(buffer: Uint8Array, offset: number, length: number, position: number): Promise<{ bytesRead: number }>;
  stat(): Promise<{ size: number }>;
}

/** The used part of WebGPU's GPUDevice. */
export interface DeviceLike<B extends BufferLike = BufferLike> {
  createBuffer(descriptor: { size: number; usage: number; label?: string }): B;
  readonly queue: {
    writeBuffer(buffer: B, offset: number, data: ArrayBuffer, dataOffset?: number, size?: number): void;
    onSubmittedWorkDone?(): Promise<unknown>;
  };
  readonly limits?: { readonly maxBufferSize: number };
  readonly lost?: Promise<{ readonly message: string }>;
  pushErrorScope?(filter: "validation" | "out-of-memory"): void;
  popErrorScope?(): Promise<{ readonly message: string } | null>;
}

/** The used part of a GPUBuffer. */
export interface BufferLike {
  destroy(): void;
}

/** The used part of WebNN's MLContext. */
export interface ContextLike<T extends BufferLike = BufferLike> {
  opSupportLimits(): {
    readonly constant?: {
      readonly dataTypes?: readonly string[];
      readonly rankRange?: { readonly min?: number; readonly max?: number };
    };
    readonly maxTensorByteLength?: number;
  };
  createConstantTensor?(descriptor: OperandDescriptor, octets: Uint8Array<ArrayBuffer>): Promise<T>;
}

/** The used part of an MLGraphBuilder. */
export interface BuilderLike {
  constant(descriptor: OperandDescriptor, octets: Uint8Array<ArrayBuffer>): unknown;
}

/** An MLOperandDescriptor. */
export interface OperandDescriptor {
  dataType: string;
  shape: number[];
}

/** A number, or a BigInt if a number would lose digits. */
export type Exact = number | bigint;

/** A typed array of the element type, or of its components. `B` is the buffer that it lies in. */
export type Elements<B extends ArrayBufferLike = ArrayBuffer> =
  | Uint8Array<B> | Int8Array<B> | Uint16Array<B> | Int16Array<B> | Uint32Array<B> | Int32Array<B>
  | BigUint64Array<B> | BigInt64Array<B> | Float16<B> | Float32Array<B> | Float64Array<B>;

/** A Float16Array, if the program's own declarations have one. */
export type Float16<B extends ArrayBufferLike = ArrayBuffer> =
  typeof globalThis extends { Float16Array: { prototype: infer Array } } ? Array & { readonly buffer: B } : never;

/** The value of an attribute or of metadata; bytes are fetched when they are read. */
export type Value = null | boolean | Exact | string | Payload | Value[];

/** Bytes that are no tensor, such as an ONNX model's graph. */
export interface Payload {
  readonly nbytes: number;
  read(options?: Cancellable): Promise<Uint8Array<ArrayBuffer>>;
}

export interface Cancellable {
  /** Aborted, it has the load fail with LoadCancelledError. */
  signal?: AbortSignal;
}

export interface Reading extends Cancellable {
  /** Called with the bytes that have arrived, and the total. */
  onProgress?: (done: number, total: number) => void;
}

export interface TensorOptions extends Reading {
  /** Read the whole payload, and check its digest first. */
  verify?: boolean;
}

export interface OpenOptions extends Reading {
  /** "index" (default): every rule of the index. "full": payloads' digests and contents too, which reads everything and
   *  calls `onProgress`. */
  verify?: "index" | "full";
  /** The source has other bytes, too: the archive is its start ("prefix") or its end ("suffix"). */
  embedded?: "prefix" | "suffix" | null;
  /** In place of the global fetch. */
  fetch?: typeof fetch;
  /** Sent with each request; Range is added. When a server redirects to another origin, fetch leaves
   *  out Authorization, and no other. */
  headers?: Headers | [string, string][] | { [name: string]: string };
  /** The `cache` option of fetch; "no-store" by default, with which no cache hides that a file was replaced. */
  cache?: "default" | "force-cache" | "no-cache" | "no-store" | "only-if-cached" | "reload";
  /** Fetch the whole file, of any size, if the server does not support ranges; up to 64 KiB are fetched anyway. */
  allowWhole?: boolean;
}

/**
 * Opens an archive: fetches header, index and trailer, and checks them; no tensor's bytes. Of a URL that takes one
 * request for 64 KiB and up to two more, embedded at the end of a file up to four; of an aligned ArrayBuffer nothing is
 * copied, and views keep it alive.
 *
 * Throws FormatError (VersionError, IntegrityError), LimitError: it is no valid archive. SourceError,
 * SourceNotFoundError: it cannot be read. LoadCancelledError. UnsupportedError: `source` is nothing to read from. An
 * archive that breaks a rule is a FormatError with no more than its number if rules.js cannot be loaded. A
 * server that is busy (429, 502, 503, 504) is asked twice again: after its Retry-After, of up to 5 seconds, or 0.25
 * and 1.
 *
 * @example
 * const record = await open("https://example.org/model.zcr");
 * const { data, shape } = await record.tensor("encoder.0.weight");
 */
export function open(source: Source, options?: OpenOptions): Promise<Record>;
export function open(source: SharedSource, options?: OpenOptions): Promise<Record<ArrayBufferLike>>;

/** The index's entry of one tensor. One with elements (`payload !== null`) has a shape of numbers. */
export type TensorInfo = FullTensorInfo | EmptyTensorInfo;

interface FullTensorInfo extends TensorInfoBase {
  readonly shape: number[];
  /** Of element [0, ...] in the file. */
  readonly offset: number;
  /** The number of the stored bytes. */
  readonly payload: number;
}

/** Of a tensor without elements: one dimension is 0. */
interface EmptyTensorInfo extends TensorInfoBase {
  readonly shape: Exact[];
  readonly offset: null;
  readonly payload: null;
}

interface TensorInfoBase {
  readonly name: string;
  /** Its element type by name, such as "bfloat16"; `unknown_200` for code 200, which this version does not know. */
  readonly dtype: string;
  readonly code: number;
  /** Bits an element takes as stored; 0 for strings. */
  readonly bits: number;
  /** In elements; null: C order. */
  readonly strides: Exact[] | null;
  /** Bytes of its own elements; of strings those of the payload. */
  readonly nbytes: number;
  /** Elements; rounded beyond 2^53, which no slice is read of. */
  readonly count: number;
  /** Of element [0, ...] in the payload. */
  readonly byteOffset: number;
  /** XXH3 of the payload; null if none was stored. */
  readonly digest: bigint | null;
  /** The full name of the module it is in. */
  readonly module: string;
}

export interface ModuleInfo {
  readonly name: string;
  readonly kind: "mapping" | "list" | "tuple" | "object" | "numbered";
  readonly typeName: string;
  /** In its whole subtree. */
  readonly tensors: number;
  /** The full name of its parent; null for the record itself. */
  readonly parent: string | null;
}

/** The record as it was saved; keys that were integers, as in an optimizer's state, are integers. */
export type Tree = Map<string | Exact, Tree> | Tree[] | TensorInfo | Value;

export interface Binding<B extends BufferLike = BufferLike> {
  /** Null for a tensor without bytes. Tied tensors have the same one. */
  readonly buffer: B | null;
  /** Of element [0, ...] in the buffer, in bytes. */
  readonly offset: number;
  /** Bytes of the payload; the buffer's size is that rounded up to 4. */
  readonly size: number;
  readonly dtype: string;
  readonly bits: number;
  /** Of a tensor without elements a dimension over 2^53 is rounded. */
  readonly shape: number[];
  readonly strides: Exact[] | null;
}

export interface UploadOptions extends Reading {
  /** Requests at a time, from 1 on; 3 by default. */
  maxInFlight?: number;
  /** GPUBufferUsage of the buffers; STORAGE | COPY_SRC by default, COPY_DST always. */
  usage?: number;
  /** Check each payload's digest on its way. */
  verify?: boolean;
}

export interface VerifyOptions extends Reading {
  maxInFlight?: number;
}

/** An opened archive. Names and entries of tensors are in memory, modules, attributes and metadata, too; the module
 *  that decodes those is loaded with the first call. Tensors' bytes are fetched by each call. */
export class Record<B extends ArrayBufferLike = ArrayBuffer> {
  private constructor();
  /** The URL (without its query) or path; null for memory. */
  readonly path: string | null;
  readonly layout: {
    readonly alignment: number; readonly baseAlignment: number; readonly indexOffset: number;
    readonly indexSize: number; readonly payloadOffset: number; readonly archiveSize: number; readonly front: boolean;
    readonly sealed: boolean; readonly digest: "xxh3" | "none";
    /** The start of the archive in the source. */
    readonly offset: number;
  };
  /** How many tensors there are. */
  readonly length: number;
  /** Every tensor's full name, in saved order. */
  readonly names: readonly string[];
  /** Bytes of stored payloads, each range once. */
  readonly nbytes: number;
  has(name: string): boolean;
  /** The index's entry of one tensor. Throws TensorNotFoundError, which lists names with the same end. */
  info(name: string): TensorInfo;
  /** Every module by its full name, the record itself as ""; in pre-order. */
  modules(): Promise<Map<string, ModuleInfo>>;
  /** Every attribute by its full name. Throws LimitError if those names add up to over 64 times the index, and
   * UnsupportedError if two are the same; `tree` has both. */
  attributes(): Promise<Map<string, Value>>;
  /** The file's own metadata, by name. */
  metadata(): Promise<Map<string, Value>>;
  /** Names of the tensors that share a tensor's bytes, its own included; empty if it shares them with none. */
  tied(name: string): Promise<readonly string[]>;
  /** The record as it was saved: Maps, arrays of list and tuple modules, attributes, and TensorInfos for tensors. */
  tree(): Promise<Tree>;
  /**
   * One tensor: fetches its bytes, or is a view of those in memory. `verify` reads the whole payload, once, and checks
   * its digest first. `onProgress` is called for each MiB or so. Throws TensorNotFoundError, IntegrityError,
   * SourceError, LoadCancelledError; FormatError for strings whose ends are wrong.
   */
  tensor(name: string, options?: TensorOptions): Promise<Tensor<B>>;
  /** The elements of one tensor in C order; packed ones one to an item. UnsupportedError for strings and
   *  for types that this version does not know. */
  array(name: string, options?: TensorOptions): Promise<Elements<B>>;
  /** Items [start, stop) of the first axis, counted as Array.prototype.slice does; fetches only their bytes. */
  slice(name: string, start?: number, stop?: number, options?: Cancellable): Promise<Tensor<B>>;
  /**
   * Every payload that the tensors need in a GPUBuffer, tied ones once. Neighbouring payloads come in one request;
   * memory holds a piece of 1 MiB for each request. On failure every buffer made is destroyed. Throws the errors of
   * `tensor`, and LimitError: the device has no room for a payload, or payloads that share their bytes would take
   * more than 64 times the archive and 1 GiB.
   */
  uploadTo<B extends BufferLike>(
    device: DeviceLike<B>, names?: Iterable<string>, options?: UploadOptions,
  ): Promise<Map<string, Binding<B>>>;
  /** Reads everything and checks all rules of payloads' bytes. Throws IntegrityError or FormatError. */
  verify(options?: VerifyOptions): Promise<void>;
  /** "sha256:..." over the content, whatever the layout; reads everything. */
  contentDigest(options?: Cancellable): Promise<string>;
  /** The record without its weights, to be filled by whatever makes them. LimitError: tensors that share their bytes
   *  would take, each by itself, more than 64 times the archive and 1 GiB. */
  hollow(options?: Cancellable & { sink?: null }): Promise<HollowRecord>;
  /** `T` is the sink's result for a constant. */
  hollow<T = unknown>(options: Cancellable & { sink: Sink }): Promise<HollowRecord<Map<string, T | null>>>;
  /**
   * A sink for `hollow` that makes WebNN's constants: MLOperands of `builder`, or without one constant MLTensors, which
   * several builders take. WebNN takes a constant's bytes as a whole: the sink holds one constant, in one buffer as
   * large as the largest. Every tensor is checked against `context.opSupportLimits()` first, and no byte is fetched. Throws
   * UnsupportedError: a tensor has a type, rank or size that the context lacks, or it makes no constant tensors. What
   * WebNN refuses later is a SourceError, whose `cause` is WebNN's.
   *
   * @example
   * const hollow = await record.hollow<MLOperand>({ sink: await record.webnnSink(context, { builder }) });
   * await hollow.stream(record);
   * const constants = hollow.seal();
   */
  webnnSink(context: ContextLike, options?: WebnnOptions): Promise<WebnnSink>;
  /**
   * The ONNX model, for onnxruntime-web: its graph with references to weights, and the weights as files that are read
   * by ranges while a session is created. Fetches the graph, values that must be in the model (tensors of up to 127
   * bytes, strings, complex numbers, tensors in attributes, functions and training_info, strided ones), and tensors
   * of up to 16 KiB, 8 MiB in all; no others. `signal` ends later reads, too, `verify` checks each payload's digest.
   * Throws UnsupportedError: there is no model, or there are several and `module` names none. FormatError: graph and
   * tensors disagree. LimitError: with those values the model is over 2 GiB, or tensors that share their bytes would take,
   * each by itself, more than 64 times the archive and 1 GiB. And the errors of `tensor`.
   *
   * @example
   * const { model, externalData } = await record.toOnnx();
   * const session = await ort.InferenceSession.create(model, { externalData });
   */
  toOnnx(options?: OnnxOptions): Promise<OnnxModel>;
  /** Closes the file, if `open` opened one. */
  close(): Promise<void>;
}

export interface WebnnOptions {
  /** An MLGraphBuilder of the context, which has not built yet. */
  builder?: BuilderLike | null;
  /** "error" (default): refuse tensors that cannot be constants. "bytes": an ArrayBuffer of their stored bytes, in C
   *  order, takes the place of a constant. */
  unsupported?: "error" | "bytes";
}

export interface WebnnSink extends Sink {
  /** Destroys the constant tensors made so far: after a failure, or when graphs are built. */
  destroy(): void;
}

export interface OnnxOptions extends Cancellable {
  /** Check each payload's digest when it is read. */
  verify?: boolean;
  /** The module of the model, in an archive of several. */
  module?: string;
}

/** The first two arguments of InferenceSession.create, of onnxruntime-web. */
export interface OnnxModel {
  readonly model: Uint8Array<ArrayBuffer>;
  /** Large tensors are in a Blob, which fetches what is read of it and holds nothing; so it cannot be sent to a worker.
   *  The record stays open as long as it is read. */
  readonly externalData: { readonly path: string; readonly data: Blob | Uint8Array<ArrayBuffer> }[];
  /** The error of the first read that failed: onnxruntime-web says no more than that its data could not be read. */
  readonly failure: RecordError | null;
}

/** A tensor's bytes, with their type and order. Element [i, j, ...] starts at item
 *  (base + i * strides[0] + j * strides[1] + ...) * components of `data`; without strides elements lie in C order. */
export class Tensor<B extends ArrayBufferLike = ArrayBuffer> {
  private constructor();
  readonly name: string;
  readonly dtype: string;
  readonly code: number;
  readonly bits: number;
  /** Of a tensor without elements a dimension over 2^53 is rounded; `info` has it exactly. */
  readonly shape: number[];
  readonly strides: Exact[] | null;
  readonly base: number;
  readonly count: number;
  /** Items of `data` an element takes: 2 for complex ones. */
  readonly components: number;
  /** True if elements are of a known type and narrower than a byte; `data` has their bytes. */
  readonly packed: boolean;
  /** float16 is a Float16Array if there is that class, else a Uint16Array, as bfloat16 is; float8 is a Uint8Array. */
  readonly data: Elements<B>;
  readonly nbytes: number;
  /** This tensor if its elements lie in C order, else a copy in which they do. */
  contiguous(): Tensor<B>;
  /** Packed elements one to an item: integers by value, floats by their bits. */
  unpack(): Elements<B>;
  /** Each string, in C order; their bytes unless `decoded`. */
  strings(options?: { decoded?: true }): string[];
  strings(options: { decoded: false }): Uint8Array<B>[];
}

/** The target of a constant's bytes: a buffer of their size, or an object that gets chunks. */
export type Target = ArrayBuffer | ArrayBufferView | {
  write(chunk: Uint8Array): unknown;
  /** True: `write` is done with the chunk once it has returned, so that the next one may come in the same memory. */
  copies?: boolean;
  /** Its result stands for the constant, unless that is undefined. */
  close?(): unknown;
  abort?(): unknown;
};

/** Called when a constant is begun, once for tied ones. */
export interface Sink {
  (name: string, info: TensorInfo): Target | Promise<Target>;
}

/** The content of a constant: bytes in C order, a typed array of its dtype, or a Tensor of its dtype and shape. Packed
 *  elements, bfloat16, float8, bools and strings come as stored bytes; all but strings as a Tensor, too. */
export type Filling = ArrayBuffer | ArrayBufferView | Tensor<ArrayBufferLike>;

/** A record whose constants are filled one by one; tied tensors are one constant. Throws FillError, ProducerError. */
export interface HollowRecord<Sealed = Record> {
  readonly names: readonly string[];
  modules(): Promise<Map<string, ModuleInfo>>;
  attributes(): Promise<Map<string, Value>>;
  metadata(): Promise<Map<string, Value>>;
  readonly state: "declared" | "filling" | "filled" | "sealed" | "aborted";
  /** Bytes in all, and bytes that are filled. */
  readonly nbytes: number;
  readonly nbytesFilled: number;
  info(name: string): TensorInfo;
  /** Names of tensors that are not filled yet, in saved order. */
  missing(): string[];
  /** Fills one constant at once; `data` is copied. */
  set(name: string, data: Filling): Promise<void>;
  /** Begins to fill one constant chunk by chunk. */
  open(name: string): Promise<Writer>;
  /** Fills missing tensors from a Record, a Map, or an iterable of [name, data or chunks of it]. */
  stream(
    source: Record<ArrayBufferLike> | Map<string, Filling> | Iterable<[string, Chunks]> | AsyncIterable<[string, Chunks]>,
    options?: Cancellable,
  ): Promise<void>;
  /** A Record over the memory that was filled; with a sink a Map from names to its results: null for tensors
   *  without bytes, which no sink is asked for. */
  seal(): Sealed;
  /** Gives it up; after `seal` it does nothing. */
  abort(): void;
}

export type Chunks = Filling | Iterable<ArrayBuffer | ArrayBufferView> | AsyncIterable<ArrayBuffer | ArrayBufferView>;

/** Fills one constant. After a failure it counts as not begun, and can be filled again. */
export interface Writer {
  /** The name it was opened by, and its entry. */
  readonly name: string;
  readonly info: TensorInfo;
  write(chunk: ArrayBuffer | ArrayBufferView): Promise<void>;
  /** Passes on all of it. */
  take(data: Filling): Promise<void>;
  close(): Promise<void>;
  abort(): void;
}

/** Base of every error: `message` has the place, the fault and advice; `what` is without the place. */
export class RecordError extends Error {
  readonly what: string;
  readonly path: string | null;
  readonly tensor: string | null;
  readonly offset: number | null;
}
/** The bytes are not a valid archive. */
export class FormatError extends RecordError {}
/** A later version, or an unknown feature. */
export class VersionError extends FormatError {}
/** A checksum or digest does not match. */
export class IntegrityError extends FormatError {}
/** A documented limit is exceeded, of the format or of the device. */
export class LimitError extends RecordError {}
/** The source, tensor or option does not support the call. */
export class UnsupportedError extends RecordError {}
/** A hollow record got other content than its index declares. */
export class ProducerError extends RecordError {}
/** A hollow record is filled twice, sealed too early, or was given up. */
export class FillError extends RecordError {}
/** The signal was aborted. */
export class LoadCancelledError extends RecordError {}
/** No tensor has that name; lists some with the same end, or that contain it. */
export class TensorNotFoundError extends RecordError {}
/** The server, the file system or the device refused, or a part of zcrecord.js cannot be loaded. */
export class SourceError extends RecordError {}
/** There is no such file. */
export class SourceNotFoundError extends SourceError {}
