/** XXH3-64 with seed 0: the checksum of frames, of slices and of blocks. */

import { createXXHash3 } from "hash-wasm";

const hasher = await createXXHash3();

export function xxh3(...parts: Uint8Array[]): bigint {
  hasher.init();
  for (const part of parts) hasher.update(part);
  return BigInt(`0x${hasher.digest()}`);
}
