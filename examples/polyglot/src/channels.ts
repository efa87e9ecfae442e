/** The two sockets of a worker: commands in and answers out, and what it publishes. */

import * as zmq from "zeromq";
import { type ClusterKey, type CurvePair, z85 } from "./wire/cluster_key.js";
import { decode, encode, OtherVersion, type Received, VERSION } from "./wire/codec.js";
import type { Message } from "./wire/messages.js";
import { Malformed } from "./wire/schema.js";

const HEARTBEAT = { heartbeatInterval: 1000, heartbeatTimeout: 3000 };
/** libzmq 4.3.5 aborts the process when a peer leaves while its receive queue is full and a heartbeat
 * is due: so it is never full. */
const RECEIVE = { receiveHighWaterMark: 0 };
/** Answers that wait for one slow caller, at the most. */
const MAX_QUEUED = 100_000;
/** The caller is gone, or so slow that answers to it would be lost: its requests end. */
const UNREACHABLE = ["EHOSTUNREACH", "EAGAIN"];
const ZAP_ADDRESS = "inproc://zeromq.zap.01";

/** A connection, by the id that the ROUTER gave it. */
export type Caller = string;

export class Channels {
  private readonly router: zmq.Router;
  private readonly publisher: zmq.Publisher;
  private readonly answers: Outbox;
  private readonly publications: Outbox;
  /** When connections were last told of another version. */
  private readonly refused = new Map<Caller, number>();
  commands = "";
  events = "";

  constructor(key: ClusterKey | undefined, onGone: (caller: Caller) => void) {
    const curve = key ? asCurveServer(key) : {};
    const sendHighWaterMark = MAX_QUEUED;
    const commands = { mandatory: true, sendHighWaterMark, ...RECEIVE, ...HEARTBEAT, ...curve };
    this.router = new zmq.Router(commands);
    this.publisher = new zmq.Publisher({ ...HEARTBEAT, ...curve });
    this.answers = new Outbox(this.router, ([id]) => {
      this.refused.delete(toCaller(id));
      onGone(toCaller(id));
    });
    this.publications = new Outbox(this.publisher);
  }

  async bind(host: string): Promise<void> {
    await this.router.bind(`tcp://${host}:*`);
    await this.publisher.bind(`tcp://${host}:*`);
    this.commands = this.router.lastEndpoint as string;
    this.events = this.publisher.lastEndpoint as string;
  }

  /** Yields messages in their order; what is not one is logged and dropped. */
  async *receive(): AsyncGenerator<[Caller, Received]> {
    for await (const [id, ...frames] of this.router) {
      const caller = toCaller(id);
      try {
        if (frames.length !== 1) throw new Malformed(`${frames.length} frames`);
        yield [caller, decode(frames[0])];
      } catch (error) {
        if (!(error instanceof Malformed)) throw error;
        if (error instanceof OtherVersion) this.refuseFrame(caller, error.got);
        console.error(`dropped a frame of connection ${caller}: ${error.message}`);
      }
    }
  }

  /** Answers frames of other versions, at most once a second on a connection. */
  private refuseFrame(caller: Caller, got: number): void {
    const now = performance.now();
    if (now < (this.refused.get(caller) ?? -Infinity) + 1000) return;
    this.refused.set(caller, now);
    this.refuseVersion(caller, got);
  }

  /** Says which version is spoken here. */
  refuseVersion(caller: Caller, got: number): void {
    this.send(caller, { type: "wrong_version", got, min_version: VERSION, max_version: VERSION });
  }

  send(to: Caller, message: Message): void {
    this.answers.put([Buffer.from(to, "hex"), encode(message)]);
  }

  publish(topic: string, ...frames: Buffer[]): void {
    this.publications.put([Buffer.from(topic), ...frames]);
  }

  close(): void {
    this.router.close();
    this.publisher.close();
  }
}

/** Sends one after the other, as a socket takes one at a time. */
class Outbox {
  private sending: Promise<void> = Promise.resolve();

  constructor(
    private readonly socket: zmq.Router | zmq.Publisher,
    private readonly onUnreachable: (frames: Buffer[]) => void = () => {},
  ) {}

  put(frames: Buffer[]): void {
    this.sending = this.sending
      .then(() => this.socket.send(frames as [Buffer, Buffer]))
      .catch((error) => {
        if (UNREACHABLE.includes(error.code)) this.onUnreachable(frames);
        else if (!this.socket.closed) console.error(`can't send: ${error}`);
      });
  }
}

function toCaller(id: Buffer): Caller {
  return id.toString("hex");
}

function asCurveServer(key: ClusterKey): { curveServer: boolean; curveSecretKey: string } {
  void admitCallers(key.curvePair("caller"));
  return { curveServer: true, curveSecretKey: key.curvePair("port").secretKey };
}

/** Lets in connections that show the callers' public key, and no other (ZAP). */
async function admitCallers({ publicKey }: CurvePair): Promise<void> {
  const handler = new zmq.Reply();
  await handler.bind(ZAP_ADDRESS);
  for await (const [version, request, , , , mechanism, key] of handler) {
    const isCaller = mechanism.toString() === "CURVE" && z85(key) === publicKey;
    const [code, text] = isCaller ? ["200", "OK"] : ["400", "not a caller of this cluster"];
    await handler.send([version, request, code, text, isCaller ? "caller" : "", ""]);
  }
}
