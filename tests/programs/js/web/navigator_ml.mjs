// WebNN as this browser has it: its interfaces, and constants on a context of its own, if it makes one.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { equal, ok } from "./harness.mjs";
import { MEMBERS } from "./webnn_standin.mjs";

/** Returns what the browser has: "no navigator.ml", the error of createContext, or how many constants were read back.
 *  Throws if an interface lacks a member that the stand-in has, or bytes differ from those of the archive. */
export async function askNavigator(base) {
  if (!navigator.ml) return "no navigator.ml";
  for (const [name, members] of Object.entries(MEMBERS)) {
    for (const member of members) ok(member in globalThis[name].prototype, `${name} has no ${member}`);
  }
  const context = await navigator.ml.createContext().catch((error) => error);
  if (context instanceof Error) return `${context.name}: ${context.message}`;
  let count = 0;
  for (const file of ["things", "front", "model", "golden/dtypes", "golden/views"]) {
    const record = await open(`${base}/${file}.zcr`);
    const builder = new MLGraphBuilder(context);
    const hollow = await record.hollow({ sink: await record.webnnSink(context, { builder, unsupported: "bytes" }) });
    await hollow.stream(record);
    const operands = [...hollow.seal()].filter(([, made]) => made instanceof MLOperand);
    const found = await readBack(context, builder, operands);
    for (const [name] of operands) {
      const { buffer, byteOffset, byteLength } = (await record.tensor(name)).contiguous().data;
      equal([file, name, found.get(name)], [file, name, new Uint8Array(buffer, byteOffset, byteLength)]);
    }
    count += operands.length;
  }
  const tensors = await (await open(`${base}/front.zcr`)).webnnSink(context).catch((error) => error.message);
  return `${count} constants read back; ${typeof tensors === "function" ? "constant tensors, too" : tensors}`;
}

/** Builds a graph that gives each constant back; returns their bytes. */
async function readBack(context, builder, operands) {
  const [outputs, tensors] = [{}, {}];
  for (const [name, operand] of operands) {
    outputs[name] = builder.reshape(operand, operand.shape); // takes more types than identity
    const { dataType, shape } = operand;
    tensors[name] = await context.createTensor({ dataType, shape, readable: true });
  }
  context.dispatch(await builder.build(outputs), {}, tensors);
  const found = new Map();
  for (const name of Object.keys(tensors)) found.set(name, new Uint8Array(await context.readTensor(tensors[name])));
  return found;
}
