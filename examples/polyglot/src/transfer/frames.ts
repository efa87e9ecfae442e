/** Lays out the frames of a transfer connection, and reads them. All integers little-endian. */

import { pack, unpack } from "../wire/codec.js";
import { xxh3 } from "./checksum.js";

export const READ = 1;
export const WRITE = 2;
export const NOTIFY = 3;
const UNREADABLE = 255;
const MAX_WHY_BYTES = 512;

export const MAX_SLICES = 1024;
export const MAX_SLICE_BYTES = 16 << 20;
const MAX_REQUEST_BYTES = 64 << 20;
const MAX_GREETING_BYTES = 4096;
const WITH_CHECKSUMS = 1;
const VERSION = 1;

export enum Status {
  Ok = 0,
  OutOfBounds = 1,
  UnknownKey = 2,
  OtherGeneration = 3,
  ReadOnly = 4,
  NotShareable = 5,
  ChecksumMismatch = 6,
  NoRoom = 7,
  NotGranted = 11,
}

/** The other side broke the framing: the connection ends with these words. */
export class BrokenFrame extends Error {}

/** Reads exactly so many bytes of a connection. */
export type Read = (n: number) => Promise<Buffer>;

export interface Slice {
  key: string;
  offset: number;
  length: number;
  sum: bigint;
}

export interface Request {
  op: number;
  id: bigint;
  generation: number;
  hasChecksums: boolean;
  slices: Slice[];
}

export interface Result {
  status: Status;
  detail?: bigint;
}

/** A hello (`HMTH`) or a proof (`HMTP`): the map, and its bytes, which proofs cover. */
export interface Greeting {
  fields: Record<string, unknown>;
  bytes: Buffer;
}

export async function readGreeting(read: Read, magic: string): Promise<Greeting> {
  const head = await read(8);
  if (head.toString("latin1", 0, 4) !== magic) throw new BrokenFrame(`no ${magic} here`);
  if (head[4] !== VERSION) throw new BrokenFrame(`version ${head[4]}, and this is ${VERSION}`);
  const n = head.readUInt16LE(6);
  if (n > MAX_GREETING_BYTES) throw new BrokenFrame(`a greeting of ${n} bytes`);
  const bytes = await read(n);
  const fields = unpack(bytes);
  if (typeof fields !== "object" || fields === null) throw new BrokenFrame("not a map");
  return { fields: fields as Record<string, unknown>, bytes };
}

/** Returns the frame of a greeting whose map is packed already. */
export function greetingFrame(magic: string, map: Buffer): Buffer {
  const head = Buffer.alloc(8);
  head.write(magic, "latin1");
  head[4] = VERSION;
  head.writeUInt16LE(map.length, 6);
  return Buffer.concat([head, map]);
}

export function packGreeting(fields: Record<string, unknown>): Buffer {
  return pack(fields);
}

/** Reads a request up to the bytes of a write, which are still to be read. */
export async function readRequest(read: Read): Promise<Request> {
  const head = await read(32);
  if (head.toString("latin1", 0, 4) !== "HMTQ") throw new BrokenFrame("no request here");
  if (head[4] !== VERSION) throw new BrokenFrame(`version ${head[4]}, and this is ${VERSION}`);
  const n = head.readUInt16LE(6);
  if (n < 1 || n > MAX_SLICES) throw new BrokenFrame(`${n} slices, and the limit is ${MAX_SLICES}`);
  const rest = await read(40 * n + 8);
  const entries = rest.subarray(0, 40 * n);
  if (rest.readBigUInt64LE(40 * n) !== xxh3(head, entries)) {
    throw new BrokenFrame("the checksum of a request is wrong");
  }
  const flags = head.readUInt32LE(8);
  if (flags > WITH_CHECKSUMS) throw new BrokenFrame(`flags ${flags} are not known here`);
  const slices = Array.from({ length: n }, (_, i) => readSlice(entries.subarray(40 * i)));
  const total = slices.reduce((sum, slice) => sum + slice.length, 0);
  if (total > MAX_REQUEST_BYTES) throw new BrokenFrame(`a request of ${total} bytes`);
  return {
    op: head[5],
    id: head.readBigUInt64LE(16),
    generation: Number(head.readBigUInt64LE(24)),
    hasChecksums: flags === WITH_CHECKSUMS,
    slices,
  };
}

function readSlice(entry: Buffer): Slice {
  const length = entry.readUInt32LE(24);
  if (length < 1 || length > MAX_SLICE_BYTES) throw new BrokenFrame(`a slice of ${length} bytes`);
  return {
    key: entry.toString("hex", 0, 16),
    offset: Number(entry.readBigUInt64LE(16)),
    length,
    sum: entry.readBigUInt64LE(32),
  };
}

/** Returns a reply up to the bytes of a read, which follow it. */
export function replyFrame(request: Request, results: Result[]): Buffer {
  const frame = Buffer.alloc(32 + 16 * results.length + 8);
  frame.write("HMTR", "latin1");
  frame[4] = VERSION;
  frame[5] = request.op;
  frame.writeUInt16LE(results.length, 6);
  frame.writeBigUInt64LE(request.id, 16);
  results.forEach(({ status, detail }, i) => {
    frame[32 + 16 * i] = status;
    frame.writeBigUInt64LE(detail ?? 0n, 40 + 16 * i);
  });
  return summed(frame);
}

/** Returns the last words on a connection whose request could not be read. */
export function unreadableFrame(why: string): Buffer {
  const text = Buffer.from(why).subarray(0, MAX_WHY_BYTES);
  const frame = Buffer.alloc(40);
  frame.write("HMTR", "latin1");
  frame[4] = VERSION;
  frame[5] = UNREADABLE;
  frame.writeUInt32LE(text.length, 8);
  return Buffer.concat([summed(frame), text]);
}

function summed(frame: Buffer): Buffer {
  const end = frame.length - 8;
  frame.writeBigUInt64LE(xxh3(frame.subarray(0, end)), end);
  return frame;
}
