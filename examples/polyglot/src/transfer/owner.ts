/** Serves a pool of pages over TCP: the owner's side of the transfer protocol. */

import { once } from "node:events";
import { type AddressInfo, createServer, type Server, type Socket } from "node:net";
import { ByteStream, EndOfStream } from "./byte_stream.js";
import { xxh3 } from "./checksum.js";
import * as frames from "./frames.js";
import { type Caller, type Identity, welcomeInitiator } from "./handshake.js";
import type { PageGrants } from "./page_grants.js";

const { Status } = frames;

export class TransferOwner {
  private readonly server: Server;
  /** Connections by the initiator's session and its number for them. */
  private readonly sockets = new Map<string, Socket>();

  constructor(
    private readonly pool: PageGrants,
    private readonly own: Identity,
  ) {
    this.server = createServer({ noDelay: true }, (socket) => void this.serve(socket));
  }

  /** Returns the address that peers dial. */
  async listen(host: string): Promise<string> {
    this.server.listen(0, host);
    await once(this.server, "listening");
    return `${host}:${(this.server.address() as AddressInfo).port}`;
  }

  close(): void {
    this.server.close();
    for (const socket of this.sockets.values()) socket.destroy();
  }

  private async serve(socket: Socket): Promise<void> {
    socket.on("error", () => {}); // reading says it too
    const stream = new ByteStream(socket);
    let isAdmitted = false;
    try {
      await welcomeInitiator(stream, this.own, (caller) => this.admit(caller, socket));
      isAdmitted = true;
      for (;;) await this.answer(stream, socket);
    } catch (error) {
      if (error instanceof EndOfStream || socket.destroyed) return;
      console.error(`a transfer connection ends: ${error}`);
      if (isAdmitted) await stream.write(frames.unreadableFrame(String(error))).catch(() => {});
    } finally {
      socket.end();
    }
  }

  /** Cuts off the connections that the caller gave up, so that their writes can't land later. */
  private admit({ session, number, over }: Caller, socket: Socket): void {
    for (const ended of over) this.sockets.get(`${session}/${ended}`)?.destroy();
    const name = `${session}/${number}`;
    this.sockets.set(name, socket);
    socket.once("close", () => this.sockets.get(name) === socket && this.sockets.delete(name));
  }

  private async answer(stream: ByteStream, socket: Socket): Promise<void> {
    const request = await frames.readRequest(stream.read);
    const results: frames.Result[] = [];
    const read: Buffer[] = [];
    for (const slice of request.slices) {
      if (request.op === frames.READ) results.push(this.read(request, slice, read));
      else if (request.op === frames.WRITE) {
        const bytes = await stream.read(slice.length);
        if (socket.destroyed) throw new EndOfStream();
        results.push(this.write(request, slice, bytes));
      } else if (request.op === frames.NOTIFY) {
        await stream.read(slice.length);
        results.push({ status: Status.NoRoom }); // nothing here waits for notifications
      } else throw new frames.BrokenFrame(`no op has the number ${request.op}`);
    }
    await stream.write(frames.replyFrame(request, results));
    for (const bytes of read) await stream.write(bytes);
  }

  private read(request: frames.Request, slice: frames.Slice, read: Buffer[]): frames.Result {
    const fault = this.fault(request, slice);
    if (fault) return fault;
    // A copy: the page may be another block's before the kernel has taken all bytes.
    const bytes = Buffer.from(this.bytesOf(slice));
    read.push(bytes);
    return { status: Status.Ok, detail: request.hasChecksums ? xxh3(bytes) : 0n };
  }

  /** A whole slice arrives before any byte of it lands, so a revoked key stops all of it. */
  private write(request: frames.Request, slice: frames.Slice, bytes: Buffer): frames.Result {
    const fault = this.fault(request, slice);
    if (fault) return fault;
    if (request.hasChecksums && xxh3(bytes) !== slice.sum) {
      return { status: Status.ChecksumMismatch };
    }
    bytes.copy(this.bytesOf(slice));
    return { status: Status.Ok };
  }

  private fault({ op, generation }: frames.Request, slice: frames.Slice): frames.Result | null {
    if (generation !== this.own.generation) {
      return { status: Status.OtherGeneration, detail: BigInt(this.own.generation) };
    }
    const status = this.pool.judge(op, slice);
    if (status === Status.Ok) return null;
    const detail = status === Status.OutOfBounds ? BigInt(this.pool.memory.length) : 0n;
    return { status, detail };
  }

  private bytesOf({ offset, length }: frames.Slice): Buffer {
    return this.pool.memory.subarray(offset, offset + length);
  }
}
