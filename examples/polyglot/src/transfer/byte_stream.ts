/** Reads and writes a socket by numbers of bytes, in the clear or in records. */

import type { Socket } from "node:net";
import type { RecordLayer } from "./records.js";

export class ByteStream {
  private readonly chunks: AsyncIterator<Buffer>;
  private readonly plain = new ByteQueue();
  private readonly opened = new ByteQueue();
  private opening?: RecordLayer;
  private sealing?: RecordLayer;

  constructor(private readonly socket: Socket) {
    this.chunks = socket[Symbol.asyncIterator]();
  }

  /** All bytes of both directions are inside of records from now on. */
  encrypt(opening: RecordLayer, sealing: RecordLayer): void {
    this.opening = opening;
    this.sealing = sealing;
  }

  read = async (n: number): Promise<Buffer> => {
    if (!this.opening) return this.readPlain(n);
    while (this.opened.size < n) this.opened.push(await this.opening.open(this.readPlain));
    return this.opened.take(n);
  };

  /** Returns when the bytes are the kernel's. */
  async write(bytes: Uint8Array): Promise<void> {
    const sent = this.sealing ? this.sealing.seal(bytes) : bytes;
    await new Promise<void>((resolve, reject) => {
      this.socket.write(sent, (error) => (error ? reject(error) : resolve()));
    });
  }

  private readPlain = async (n: number): Promise<Buffer> => {
    while (this.plain.size < n) {
      const { value, done } = await this.chunks.next();
      if (done) throw new EndOfStream();
      this.plain.push(value);
    }
    return this.plain.take(n);
  };
}

/** The other side closed the connection. */
export class EndOfStream extends Error {}

class ByteQueue {
  private chunks: Buffer[] = [];
  size = 0;

  push(chunk: Buffer): void {
    this.chunks.push(chunk);
    this.size += chunk.length;
  }

  take(n: number): Buffer {
    const taken: Buffer[] = [];
    for (let wanted = n; wanted > 0; ) {
      const chunk = this.chunks[0];
      const part = chunk.subarray(0, wanted);
      taken.push(part);
      wanted -= part.length;
      if (part.length < chunk.length) this.chunks[0] = chunk.subarray(part.length);
      else this.chunks.shift();
    }
    this.size -= n;
    return taken.length === 1 ? taken[0] : Buffer.concat(taken);
  }
}
