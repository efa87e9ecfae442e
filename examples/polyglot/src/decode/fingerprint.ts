/** Computes the name of a checkpoint in KV layouts and block hashes. */

import { createHash, type Hash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const NEUTRAL = new Set([
  "dtype",
  "torch_dtype",
  "transformers_version",
  "_name_or_path",
  "use_cache",
]);
const WHOLE_BYTES = 64 << 20;

/** Covers config.json and the weights; files of more than 64 MiB are not read here. */
export function fingerprint(folder: string): string {
  const digest = createHash("sha256").update("halfmoon.model.v1");
  const config = readFileSync(join(folder, "config.json"), "utf8");
  addCounted(digest, Buffer.from(canonical(config)));
  for (const name of readdirSync(folder).filter(isWeights).sort()) {
    const weights = readFileSync(join(folder, name));
    if (weights.length > WHOLE_BYTES) throw new Error(`${name} is too large for this example`);
    addCounted(digest, Buffer.from(name));
    digest.update(u64(weights.length)).update(weights);
  }
  return digest.digest("hex").slice(0, 32);
}

function isWeights(name: string): boolean {
  return name.endsWith(".safetensors");
}

/** Returns the config as Python's `json.dumps(…, sort_keys=True, separators=(",", ":"))` has it. */
function canonical(text: string): string {
  // Numbers keep their letters: JavaScript would write 1e-06 as 0.000001, and 1.0 as 1.
  const numbers: string[] = [];
  const marked = text.replace(/"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g, (found) => {
    if (found.startsWith('"')) return found;
    numbers.push(found);
    return `{"number":${numbers.length - 1}}`;
  });
  const write = (value: unknown): string => {
    if (Array.isArray(value)) return `[${value.map(write).join(",")}]`;
    if (value === null || typeof value !== "object") return asAscii(JSON.stringify(value));
    if ("number" in value) return pythonNumber(numbers[value.number as number]);
    const fields = Object.entries(value).filter(([key]) => !NEUTRAL.has(key));
    const sorted = fields.sort(([one], [other]) => (one < other ? -1 : 1));
    return `{${sorted.map(([key, inner]) => `${asAscii(JSON.stringify(key))}:${write(inner)}`).join(",")}}`;
  };
  return write(JSON.parse(marked));
}

/** Returns the shortest form of a float as Python writes it; integers as they are. */
function pythonNumber(text: string): string {
  if (/^-?\d+$/.test(text)) return text;
  const value = Number(text);
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-4 || size >= 1e16)) {
    return value.toExponential().replace(/e([+-])(\d)$/, "e$10$2");
  }
  return Number.isInteger(value) ? `${value}.0` : String(value);
}

function asAscii(text: string): string {
  return text.replace(/[\u007f-\uffff]/g, (letter) => {
    return `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`;
  });
}

function addCounted(digest: Hash, part: Buffer): void {
  digest.update(u64(part.length)).update(part);
}

function u64(value: number): Buffer {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(value));
  return bytes;
}
