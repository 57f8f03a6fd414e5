// A program that uses everything zcrecord.d.ts declares: it compiles, and what is marked does not.

import {
  Binding, Elements, FillError, FormatError, HollowRecord, OnnxModel, Record, RecordError, SourceError,
  SourceNotFoundError, Tensor, TensorInfo, Tree, Value, open,
} from "../../../../zcrecord/web/reader/zcrecord.js";

interface GPU {
  destroy(): void;
  readonly size: number;
}

declare const device: {
  createBuffer(descriptor: { size: number; usage: number }): GPU;
  queue: { writeBuffer(buffer: GPU, offset: number, data: ArrayBuffer, from?: number, size?: number): void };
};

// As WebNN's IDL is declared in TypeScript.
type MLOperandDataType = "float32" | "float16" | "int32" | "uint32" | "int64" | "uint64" | "int8" | "uint8";
interface MLOperandDescriptor {
  dataType: MLOperandDataType;
  shape: number[];
}
interface MLTensorLimits {
  dataTypes?: MLOperandDataType[];
  rankRange?: { min?: number; max?: number };
}
declare class MLOperand {
  readonly dataType: MLOperandDataType;
}
declare class MLTensor {
  destroy(): undefined;
}
declare class MLGraphBuilder {
  constant(descriptor: MLOperandDescriptor, buffer: AllowSharedBufferSource): MLOperand;
  constant(dataType: MLOperandDataType, value: number | bigint): MLOperand;
  constant(tensor: MLTensor): MLOperand;
}
declare const context: {
  opSupportLimits(): { maxTensorByteLength?: number; input?: MLTensorLimits; constant?: MLTensorLimits };
  createConstantTensor(descriptor: MLOperandDescriptor, inputData: AllowSharedBufferSource): Promise<MLTensor>;
};

export async function everything(source: string | URL | Blob | ArrayBuffer): Promise<number> {
  const stop = new AbortController();
  const { signal } = stop;
  const record: Record = await open(source, { signal, verify: "full", embedded: "suffix", headers: { a: "b" },
    cache: "default" });
  const info: TensorInfo = record.info(record.names[0]!);
  const claimed: (number | bigint)[] = info.shape;
  const elements: number = info.payload === null ? 0 : info.shape.reduce((a, b) => a * b, 1);
  const onProgress = (done: number, total: number) => done / total;
  await open(source, { verify: "full", onProgress });
  const tensor: Tensor = await record.tensor(info.name, { verify: true, onProgress });
  const data: Elements = tensor.contiguous().data;
  const digest: ArrayBuffer = await crypto.subtle.digest("SHA-256", tensor.data);
  const blob = new Blob([tensor.data, await record.array(info.name)]);
  const shape: number[] = tensor.shape;
  const threads = await open(new SharedArrayBuffer(8));
  // @ts-expect-error: threads may change it
  await crypto.subtle.digest("SHA-256", (await threads.tensor("w")).data);
  const texts: string[] = tensor.strings();
  const raw: Uint8Array[] = tensor.strings({ decoded: false });
  const tree: Tree = await record.tree();
  const value: Value | undefined = (await record.attributes()).get("version");
  const bound: Map<string, Binding<GPU>> = await record.uploadTo(device, ["w"], { onProgress });
  const size: number | undefined = bound.get("w")?.buffer?.size;
  const hollow: HollowRecord<Map<string, unknown>> = await record.hollow({ sink: (_, told) => new Uint8Array(told.nbytes) });
  await hollow.stream(record);
  await hollow.stream([["w", new Float32Array(3)], ["b", [new Uint8Array(3)]]]);
  const writer = await hollow.open("w");
  await writer.write(new Uint8Array(1));
  if (hollow.state === "filled") console.log(hollow.seal().size);
  const filled: Record = (await record.hollow()).seal();
  const operands: Map<string, number | null> = (await record.hollow<number>({ sink: () => new Uint8Array(1) })).seal();
  const sink = await record.webnnSink(context, { builder: new MLGraphBuilder(), unsupported: "bytes" });
  const constants: Map<string, MLOperand | null> = (await record.hollow<MLOperand>({ sink })).seal();
  sink.destroy();
  const { model, externalData, failure }: OnnxModel = await record.toOnnx({ signal, verify: true });
  const files: (Blob | Uint8Array<ArrayBuffer>)[] = externalData.map(({ data }) => data);
  // @ts-expect-error: there is no such level
  await open(source, { verify: "touch" });
  // @ts-expect-error: a name is text
  await record.slice(5);
  // @ts-expect-error: what is opened is not to be changed
  record.length = 5;
  const errors: RecordError[] = [new FormatError("a"), new FillError("b"), new SourceNotFoundError("c")];
  const where: string | null = errors[0]!.tensor;
  await record.close();
  return [constants, model, files, failure?.what, claimed, elements, digest, blob, filled, operands, shape, data, texts, raw, tree, value, size, where, errors[2] instanceof SourceError].length;
}
