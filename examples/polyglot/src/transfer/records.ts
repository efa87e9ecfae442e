/** Encrypts a connection from the owner's proof on: AES-256-GCM in records. */

import * as crypto from "node:crypto";

const MAX_RECORD_BYTES = 65536;
const TAG_BYTES = 16;
const INFO = "halfmoon transfer records 1";

export interface RecordKeys {
  initiator: Buffer;
  owner: Buffer;
}

/** Returns the keys of both directions. */
export function recordKeys(own: crypto.KeyObject, peer: Uint8Array, salt: Uint8Array): RecordKeys {
  const x = Buffer.from(peer).toString("base64url");
  const publicKey = crypto.createPublicKey({
    key: { kty: "OKP", crv: "X25519", x },
    format: "jwk",
  });
  const secret = crypto.diffieHellman({ privateKey: own, publicKey });
  const keys = Buffer.from(crypto.hkdfSync("sha256", secret, salt, INFO, 64));
  return { initiator: keys.subarray(0, 32), owner: keys.subarray(32) };
}

/** One direction of a connection: seals what is sent, or opens what is received. */
export class RecordLayer {
  private n = 0n;

  constructor(private readonly key: Buffer) {}

  /** Returns the records of some bytes. */
  seal(bytes: Uint8Array): Buffer {
    const records: Buffer[] = [];
    for (let at = 0; at < bytes.length; at += MAX_RECORD_BYTES) {
      const part = bytes.subarray(at, at + MAX_RECORD_BYTES);
      const head = Buffer.alloc(4);
      head.writeUInt32LE(part.length);
      const cipher = crypto.createCipheriv("aes-256-gcm", this.key, this.nonce()).setAAD(head);
      records.push(head, cipher.update(part), cipher.final(), cipher.getAuthTag());
    }
    return Buffer.concat(records);
  }

  /** Reads and opens one record. */
  async open(read: (n: number) => Promise<Buffer>): Promise<Buffer> {
    const head = await read(4);
    const n = head.readUInt32LE();
    if (n < 1 || n > MAX_RECORD_BYTES) throw new Error(`a record of ${n} bytes`);
    const sealed = await read(n + TAG_BYTES);
    const cipher = crypto.createDecipheriv("aes-256-gcm", this.key, this.nonce()).setAAD(head);
    cipher.setAuthTag(sealed.subarray(n));
    return Buffer.concat([cipher.update(sealed.subarray(0, n)), cipher.final()]);
  }

  private nonce(): Buffer {
    const nonce = Buffer.alloc(12);
    nonce.writeBigUInt64LE(this.n++, 4);
    return nonce;
  }
}
