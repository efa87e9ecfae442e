/** Reads the tensors of a model's folder: float32 or bfloat16, as float32. */

import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

interface TensorInfo {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

export function readTensors(folder: string): Map<string, Float32Array> {
  const tensors = new Map<string, Float32Array>();
  for (const name of readdirSync(folder).filter((file) => file.endsWith(".safetensors"))) {
    const file = readFileSync(join(folder, name));
    const start = 8 + Number(file.readBigUInt64LE(0));
    const header: Record<string, TensorInfo> = JSON.parse(file.toString("utf8", 8, start));
    for (const [tensor, { dtype, data_offsets }] of Object.entries(header)) {
      if (tensor === "__metadata__") continue;
      const [from, to] = data_offsets;
      tensors.set(tensor, asFloats(file.subarray(start + from, start + to), dtype));
    }
  }
  return tensors;
}

function asFloats(bytes: Buffer, dtype: string): Float32Array {
  if (dtype === "F32") return new Float32Array(new Uint8Array(bytes).buffer);
  if (dtype !== "BF16") throw new Error(`tensors of ${dtype} can't be read here`);
  const words = new Uint32Array(bytes.length / 2);
  for (let i = 0; i < words.length; i++) words[i] = bytes.readUInt16LE(2 * i) << 16;
  return new Float32Array(words.buffer);
}
