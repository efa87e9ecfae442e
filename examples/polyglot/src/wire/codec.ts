/** Turns messages into frames and back: a version byte, then a MessagePack map. */

import { Packr } from "msgpackr";
import type { Message } from "./messages.js";
import { BY_TAG, checked, type Filled, Malformed } from "./schema.js";

/** The only version of the protocol that is spoken here. */
export const VERSION = 1;
const MAX_FRAME_BYTES = 16 << 20;

const packer = new Packr({ useRecords: false, int64AsType: "bigint", copyBuffers: true });

/** A frame of a version of the protocol that is not spoken here. */
export class OtherVersion extends Malformed {
  constructor(readonly got: number) {
    super(`version ${got}, and this is ${VERSION}`);
  }
}

export type Received = Filled<Message>;

export function encode(message: Message): Buffer {
  return Buffer.concat([Buffer.of(VERSION), pack(message)]);
}

/** Returns the message of a frame, with its defaults, or throws `Malformed`. */
export function decode(frame: Uint8Array): Received {
  if (frame.length > MAX_FRAME_BYTES) throw new Malformed(`a frame of ${frame.length} bytes`);
  if (frame.length > 0 && frame[0] !== VERSION) throw new OtherVersion(frame[0]);
  const fields = unpack(frame.subarray(1)) as { type?: unknown } | null;
  const name = BY_TAG.get(fields?.type);
  if (!name) throw new Malformed(`no message has the tag ${String(fields?.type).slice(0, 100)}`);
  return checked(fields, name) as Received;
}

/** MessagePack of a value, with integers of more than 32 bits as integers. */
export function pack(value: unknown): Buffer {
  return packer.pack(widened(value));
}

export function unpack(bytes: Uint8Array): unknown {
  try {
    return packer.unpack(bytes);
  } catch (error) {
    throw new Malformed(`not MessagePack: ${error}`);
  }
}

/** msgpackr would write a long integer as a float. */
function widened(value: unknown): unknown {
  if (typeof value === "number") {
    return Number.isSafeInteger(value) && Math.abs(value) >= 2 ** 31 ? BigInt(value) : value;
  }
  if (typeof value !== "object" || value === null || ArrayBuffer.isView(value)) return value;
  if (Array.isArray(value)) return value.map(widened);
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, widened(inner)]));
}
