/** Writes KV events in vLLM's format: what a kvstore stores and removes. */

import { pack } from "./codec.js";

export type KvEvent =
  | {
      type: "BlockStored";
      block_hashes: Uint8Array[];
      parent_block_hash: Uint8Array | null;
      token_ids: number[];
      block_size: number;
      medium: "CPU";
    }
  | { type: "BlockRemoved"; block_hashes: Uint8Array[]; medium: "CPU" }
  | { type: "AllBlocksCleared" };

/** Returns the frames behind the topic. `now` is a time of day in seconds. */
export function eventFrames(sequence: bigint, now: number, events: KvEvent[]): [Buffer, Buffer] {
  const number = Buffer.alloc(8);
  number.writeBigInt64BE(sequence);
  return [number, pack([now, events, null])];
}
