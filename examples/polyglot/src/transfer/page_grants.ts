/** Decides which bytes of a pool of pages a peer may touch. Every key is for some pages. */

import { randomBytes } from "node:crypto";
import type { Region } from "../wire/messages.js";
import { READ, type Slice, Status, WRITE } from "./frames.js";

interface Grant {
  ops: (typeof READ | typeof WRITE)[];
  pages: Set<number>;
  pageBytes: number;
}

export class PageGrants {
  private readonly grants = new Map<string, Grant>();

  constructor(
    readonly segment: string,
    readonly generation: number,
    readonly memory: Buffer,
  ) {}

  toRead(pages: number[], pageBytes: number): Region {
    return this.grant({ ops: [READ], pages: new Set(pages), pageBytes });
  }

  toWrite(pages: number[], pageBytes: number): Region {
    return this.grant({ ops: [WRITE], pages: new Set(pages), pageBytes });
  }

  /** For a put, which the first stage of a group reads back for its sums. */
  toWriteAndRead(pages: number[], pageBytes: number): Region {
    return this.grant({ ops: [WRITE, READ], pages: new Set(pages), pageBytes });
  }

  /** From now on the region's key opens nothing. */
  revoke(region: Region): void {
    this.grants.delete(hex(region.key));
  }

  /** Returns why a slice may not be read or written, or `Status.Ok`. */
  judge(op: number, { key, offset, length }: Slice): Status {
    const grant = this.grants.get(key);
    if (!grant) return Status.UnknownKey;
    if (offset + length > this.memory.length) return Status.OutOfBounds;
    if (!grant.ops.some((each) => each === op)) return Status.NotGranted;
    const last = Math.floor((offset + length - 1) / grant.pageBytes);
    for (let page = Math.floor(offset / grant.pageBytes); page <= last; page++) {
      if (!grant.pages.has(page)) return Status.NotGranted;
    }
    return Status.Ok;
  }

  private grant(grant: Grant): Region {
    const key = randomBytes(16);
    this.grants.set(hex(key), grant);
    return { segment: this.segment, generation: this.generation, key, length: this.memory.length };
  }
}

function hex(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString("hex");
}
