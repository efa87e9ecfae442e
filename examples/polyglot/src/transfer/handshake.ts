/** Answers the hello of an initiator: who this is, proofs of the cluster key, and encryption. */

import { generateKeyPairSync, type KeyObject, randomBytes, timingSafeEqual } from "node:crypto";
import { type ClusterKey, rawPublicKey } from "../wire/cluster_key.js";
import type { ByteStream } from "./byte_stream.js";
import { BrokenFrame, greetingFrame, packGreeting, readGreeting } from "./frames.js";
import { type RecordKeys, RecordLayer, recordKeys } from "./records.js";

const DOMAIN = Buffer.from("halfmoon transfer 1");
const NONE = new Uint8Array();
/** Bytes of fields that may also be empty. */
const LENGTHS = { session: 16, nonce: 32, share: 32 };

export interface Identity {
  segment: string;
  generation: number;
  clusterKey?: ClusterKey;
  encrypts: boolean;
}

/** What an initiator says of its connection. */
export interface Caller {
  session: string;
  number: number;
  over: number[];
}

/** This side or the other does not want the connection. */
export class Refused extends Error {}

/**
 * Returns once requests may be read; throws `Refused` when the caller was told why not.
 *
 * `admit` is called before the answer that confirms the caller: the hello, or with a key the proof.
 */
export async function welcomeInitiator(
  stream: ByteStream,
  own: Identity,
  admit: (caller: Caller) => void,
): Promise<void> {
  const asked = await readGreeting(stream.read, "HMTH");
  requireReadable(asked.fields);
  const nonce = bytesOf(asked.fields.nonce);
  const peerShare = bytesOf(asked.fields.share);
  const refused = reasonToRefuse(asked.fields, nonce, peerShare, own);
  const pair = own.clusterKey && own.encrypts ? generateKeyPairSync("x25519") : undefined;
  const answer = packGreeting({
    segment: own.segment,
    generation: own.generation,
    refused,
    nonce: own.clusterKey ? randomBytes(32) : NONE,
    share: pair ? rawPublicKey(pair.privateKey) : NONE,
  });
  const caller = {
    session: Buffer.from(bytesOf(asked.fields.session)).toString("hex"),
    number: Number(asked.fields.number ?? 0),
    over: Array.isArray(asked.fields.over) ? asked.fields.over.map(Number) : [],
  };
  if (!refused && !own.clusterKey) admit(caller);
  await stream.write(greetingFrame("HMTH", answer));
  if (refused) throw new Refused(refused);
  if (own.clusterKey) {
    const proofs = (role: string) =>
      proofOf(own.clusterKey as ClusterKey, role, asked.bytes, answer);
    const { fields } = await readGreeting(stream.read, "HMTP");
    let denied = "";
    let keys: RecordKeys | undefined;
    if (!areEqual(bytesOf(fields.proof), proofs("initiator"))) {
      denied = "the proof is not one of this cluster's key";
    } else if (pair) {
      keys = keysWith(pair.privateKey, peerShare, proofs("records"));
      if (!keys) denied = "the share gives no secret";
    }
    const proof = denied ? NONE : proofs("owner");
    if (!denied) admit(caller);
    await stream.write(greetingFrame("HMTP", packGreeting({ proof, refused: denied })));
    if (denied) throw new Refused(denied);
    if (keys) stream.encrypt(new RecordLayer(keys.initiator), new RecordLayer(keys.owner));
  }
}

/** Returns HMAC-SHA-256 over the parts, each but the first after its length. */
export function proofOf(
  key: ClusterKey,
  role: string,
  initiator: Uint8Array,
  owner: Uint8Array,
): Buffer {
  const parts = [Buffer.from(role), initiator, owner].flatMap((part) => {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(part.length);
    return [length, part];
  });
  return key.hmac(DOMAIN, ...parts);
}

/** Returns the keys of the connection's records; undefined for a share that gives no secret. */
function keysWith(own: KeyObject, share: Uint8Array, salt: Uint8Array): RecordKeys | undefined {
  try {
    return recordKeys(own, share, salt);
  } catch {
    return undefined;
  }
}

function reasonToRefuse(
  fields: Record<string, unknown>,
  nonce: Uint8Array,
  share: Uint8Array,
  own: Identity,
): string {
  if (fields.segment !== own.segment) return `this is segment ${own.segment}`;
  if (Number(fields.generation) !== own.generation) return `this is generation ${own.generation}`;
  if (own.clusterKey && nonce.length !== 32) return "a cluster key is needed here";
  if (!own.clusterKey && nonce.length > 0) return "there is no cluster key here";
  const encrypts = own.clusterKey !== undefined && own.encrypts;
  if (encrypts !== (share.length === 32)) return `encryption is ${encrypts ? "on" : "off"} here`;
  return "";
}

/** Throws unless each field is missing, or of the type and length that it has. */
function requireReadable(fields: Record<string, unknown>): void {
  for (const [name, length] of Object.entries(LENGTHS)) {
    const value = fields[name];
    if (value === undefined) continue;
    if (!(value instanceof Uint8Array) || ![0, length].includes(value.length)) {
      throw new BrokenFrame(`${name} has ${length} bytes`);
    }
  }
  for (const name of ["segment", "origin"]) {
    if (name in fields && typeof fields[name] !== "string")
      throw new BrokenFrame(`${name} is text`);
  }
}

function bytesOf(value: unknown): Uint8Array {
  return value instanceof Uint8Array ? value : NONE;
}

function areEqual(one: Uint8Array, other: Uint8Array): boolean {
  return one.length === other.length && timingSafeEqual(one, other);
}
