/** Stands up a worker: its records, its sockets, its hellos, its loads, and its end. */

import { type Caller, Channels } from "./channels.js";
import { Membership } from "./membership.js";
import { type Metadata, openMetadata } from "./metadata.js";
import type { Settings } from "./settings.js";
import { TransferOwner } from "./transfer/owner.js";
import { PageGrants } from "./transfer/page_grants.js";
import { encode, type Received, VERSION } from "./wire/codec.js";
import type { Message, WorkerInfo } from "./wire/messages.js";

const TICK_S = 0.1;
const IDLE_LOAD_S = 1;
const PROBE_S = 1;

/** What a kvstore or a decode worker does with what it is told. */
export interface Service {
  handle(message: Received, caller: Caller): void | Promise<void>;
  /** Ends what is past its time. Called often. */
  tick(now: number): void;
  load(): Message;
  /** A connection is down: its requests end. */
  forget(caller: Caller): void;
  /** True when nothing is under way that a stop should wait for. */
  isIdle(): boolean;
}

export class Worker {
  private readonly conductors = new Map<Caller, string>();
  private readonly timers: NodeJS.Timeout[] = [];
  private service!: Service;
  private membership!: Membership;
  private isStopping = false;
  private published = 0;

  private constructor(
    readonly settings: Settings,
    readonly metadata: Metadata,
    readonly channels: Channels,
    readonly pool: PageGrants,
    private readonly owner: TransferOwner,
    readonly record: WorkerInfo,
  ) {}

  /** Opens all that a worker needs; peers see it once it serves. */
  static async open(settings: Settings, role: WorkerInfo["role"]): Promise<Worker> {
    const { workerId, clusterKey } = settings;
    const metadata = openMetadata(settings.metadataUrl, clusterKey);
    const generation = await Membership.nextGeneration(metadata, workerId);
    const channels = new Channels(clusterKey, (caller) => worker.forget(caller));
    await channels.bind(settings.host);
    const pool = new PageGrants(workerId, generation, Buffer.alloc(settings.capacityBytes));
    const encrypts = settings.encryptsTransfers;
    const owner = new TransferOwner(pool, { segment: workerId, generation, clusterKey, encrypts });
    const record: WorkerInfo = {
      worker_id: workerId,
      role,
      generation,
      host: settings.hostName,
      commands: channels.commands,
      events: channels.events,
      ...(clusterKey && { key_id: clusterKey.id }),
    };
    const worker = new Worker(settings, metadata, channels, pool, owner, record);
    return worker;
  }

  /** Serves until the process is told to stop, and what is under way is done. */
  async serve(service: Service): Promise<void> {
    this.service = service;
    const { worker_id: name, generation, host: host_id } = this.record;
    const address = await this.owner.listen(this.settings.transferHost);
    const segment = { name, generation, host_id, endpoints: { tcp: { address, origin: "" } } };
    this.membership = new Membership(this.metadata, this.record, segment, () => {
      console.error(`another process is ${name} now, of a higher generation`);
      process.exit(1);
    });
    await this.membership.join();
    process.once("SIGTERM", () => void this.stop());
    process.once("SIGINT", () => void this.stop());
    this.every(TICK_S, () => this.keepHouse(performance.now() / 1000));
    this.every(PROBE_S, () => this.probe());
    console.error(`${name} serves at ${this.record.commands}`);
    for await (const [caller, message] of this.channels.receive()) {
      try {
        await this.receive(message, caller);
      } catch (error) {
        console.error(`${message.type} of connection ${caller} failed:`, error);
      }
    }
  }

  send(to: Caller, message: Message): void {
    this.channels.send(to, message);
  }

  /** Changes the record, for the metadata server and for all conductors. */
  async change(fields: Partial<WorkerInfo>): Promise<void> {
    Object.assign(this.record, fields);
    for (const caller of this.conductors.keys()) this.welcome(caller);
    await this.membership.renew();
  }

  /** Finishes what is under way, for a while, and takes nothing new. */
  async stop(): Promise<void> {
    if (this.isStopping) process.exit(1);
    this.isStopping = true;
    await this.change({ draining: true });
    const end = performance.now() + 1000 * this.settings.drainS;
    while (!this.service.isIdle() && performance.now() < end) await sleep(TICK_S);
    await this.membership.leave();
    for (const timer of this.timers) clearInterval(timer);
    this.owner.close();
    this.channels.close();
    this.metadata.close();
    process.exit(0);
  }

  /** Ends what is past its time, and publishes the load: often while there is any. */
  private keepHouse(now: number): void {
    this.service.tick(now);
    if (this.service.isIdle() && now < this.published + IDLE_LOAD_S) return;
    this.published = now;
    this.channels.publish("load", encode(this.service.load()));
  }

  private async receive(message: Received, caller: Caller): Promise<void> {
    if (message.type === "hello") {
      const { min_version, max_version } = message;
      if (min_version > VERSION || max_version < VERSION) {
        return this.channels.refuseVersion(caller, max_version);
      }
      this.conductors.set(caller, message.conductor_id);
      this.welcome(caller);
    } else if (message.type === "unwelcome") {
      console.error(`a conductor will not use this worker: ${message.reason}`);
      this.conductors.delete(caller);
      // A kvstore goes on, for objects and for other conductors.
      if (this.record.role !== "kvstore" && this.conductors.size === 0) await this.stop();
    } else await this.service.handle(message, caller);
  }

  private welcome(caller: Caller): void {
    this.send(caller, { type: "welcome", worker: this.record });
  }

  /** Sends to connections whose conductor said hello on a later one: if they are down, it fails. */
  private probe(): void {
    const latest = new Map([...this.conductors].map(([caller, name]) => [name, caller]));
    for (const [caller, name] of this.conductors) {
      if (latest.get(name) !== caller) this.welcome(caller);
    }
  }

  private forget(caller: Caller): void {
    this.conductors.delete(caller);
    this.service.forget(caller);
  }

  private every(seconds: number, call: () => void): void {
    this.timers.push(setInterval(call, 1000 * seconds));
  }
}

function sleep(seconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
}
