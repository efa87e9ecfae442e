/** Derives from the cluster key all that proves the right to take part. */

import { createHmac, createPrivateKey, createPublicKey, type KeyObject } from "node:crypto";

const PKCS8_X25519 = Buffer.from("302e020100300506032b656e04220420", "hex");
const Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

export interface CurvePair {
  secretKey: string;
  publicKey: string;
}

export class ClusterKey {
  constructor(private readonly key: string) {}

  hmac(...parts: Uint8Array[]): Buffer {
    return createHmac("sha256", this.key).update(Buffer.concat(parts)).digest();
  }

  /** Names the key in records, without telling it. */
  get id(): string {
    return this.hmac(Buffer.from("halfmoon key id 1")).toString("hex").slice(0, 16);
  }

  /** What a request to the metadata server shows. */
  get metadataToken(): string {
    return this.hmac(Buffer.from("halfmoon metadata 1")).toString("hex");
  }

  /** The CURVE pair of all ports of the cluster, or of all callers, in Z85. */
  curvePair(side: "port" | "caller"): CurvePair {
    const secret = this.hmac(Buffer.from(`halfmoon curve ${side} 1`));
    const publicKey = rawPublicKey(x25519(secret));
    return { secretKey: z85(secret), publicKey: z85(publicKey) };
  }
}

export function x25519(secret: Uint8Array): KeyObject {
  const key = Buffer.concat([PKCS8_X25519, secret]);
  return createPrivateKey({ key, format: "der", type: "pkcs8" });
}

/** Returns the 32 bytes of the public key that belongs to a private one. */
export function rawPublicKey(privateKey: KeyObject): Buffer {
  const { x } = createPublicKey(privateKey).export({ format: "jwk" });
  return Buffer.from(x as string, "base64url");
}

/** ZeroMQ's base 85 (https://rfc.zeromq.org/spec/32/). */
export function z85(bytes: Buffer): string {
  let text = "";
  for (let at = 0; at < bytes.length; at += 4) {
    const value = bytes.readUInt32BE(at);
    for (let power = 85 ** 4; power >= 1; power /= 85) text += Z85[Math.floor(value / power) % 85];
  }
  return text;
}
