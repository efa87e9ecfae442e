/** Computes the chained hashes by which blocks of a prompt are known. */

import { createHash } from "node:crypto";

const DOMAIN = Buffer.from("halfmoon.block.v1");

/** Returns what the hash of a prompt's first block continues. */
export function rootHash(model: string, salt: string, blockSize: number): Buffer {
  return first16(DOMAIN, u32(blockSize), counted(model), counted(salt));
}

/** Returns the hashes of all full blocks of a prompt. */
export function blockHashes(root: Uint8Array, tokenIds: number[], blockSize: number): Buffer[] {
  const hashes: Buffer[] = [];
  for (let end = blockSize; end <= tokenIds.length; end += blockSize) {
    const tokens = tokenIds.slice(end - blockSize, end).map(u32);
    hashes.push(first16(hashes.at(-1) ?? root, ...tokens));
  }
  return hashes;
}

function first16(...parts: Uint8Array[]): Buffer {
  return createHash("sha256").update(Buffer.concat(parts)).digest().subarray(0, 16);
}

function counted(text: string): Buffer {
  const bytes = Buffer.from(text);
  return Buffer.concat([u32(bytes.length), bytes]);
}

function u32(value: number): Buffer {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value);
  return bytes;
}
