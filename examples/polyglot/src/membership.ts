/** Keeps a worker's records in the metadata server, under leases that are renewed. */

import type { Metadata } from "./metadata.js";
import type { WorkerInfo } from "./wire/messages.js";

const LEASE_S = 10;
const RENEW_S = LEASE_S / 3;

export interface Segment {
  name: string;
  generation: number;
  host_id: string;
  endpoints: { tcp: { address: string; origin: string } };
}

export class Membership {
  private timer?: NodeJS.Timeout;
  /** Writes one after the other, so that an older record does not come last. */
  private writing: Promise<void> = Promise.resolve();

  constructor(
    private readonly metadata: Metadata,
    readonly record: WorkerInfo,
    private readonly segment: Segment,
    /** A process of a higher generation has this worker's name now. */
    private readonly onReplaced: () => void,
  ) {}

  /** Counts up how often this worker was started; waits for the metadata server. */
  static async nextGeneration(metadata: Metadata, workerId: string): Promise<number> {
    for (;;) {
      try {
        // A record may have outlived the counter, when the server has lost its data.
        let least = 0;
        for (const kind of ["members", "segments"]) {
          const there = await metadata.get(`halfmoon/${kind}/${workerId}`);
          least = Math.max(least, there ? JSON.parse(there).generation : 0);
        }
        let generation = 0;
        while (generation <= least) {
          generation = await metadata.increment(`halfmoon/generation/${workerId}`);
        }
        return generation;
      } catch (error) {
        console.error(`the metadata server does not answer yet: ${error}`);
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
  }

  async join(): Promise<void> {
    await this.write();
    this.timer = setInterval(() => void this.renew(), 1000 * RENEW_S);
  }

  /** Writes the record again, after it changed or before its lease ends. */
  renew(): Promise<void> {
    this.writing = this.writing
      .then(() => this.write())
      .catch((error) => {
        console.error(`metadata: ${error}`); // the next renewal tries again
      });
    return this.writing;
  }

  async leave(): Promise<void> {
    clearInterval(this.timer);
    await this.writing;
    await this.metadata.delete(this.memberKey);
    await this.metadata.delete(this.segmentKey);
  }

  private async write(): Promise<void> {
    const found = await this.metadata.get(this.memberKey);
    if (found && JSON.parse(found).generation > this.record.generation) {
      clearInterval(this.timer);
      this.onReplaced();
      return;
    }
    await this.metadata.put(this.segmentKey, JSON.stringify(this.segment), LEASE_S);
    await this.metadata.put(this.memberKey, JSON.stringify(this.record), LEASE_S);
  }

  private get memberKey(): string {
    return `halfmoon/members/${this.record.worker_id}`;
  }

  private get segmentKey(): string {
    return `halfmoon/segments/${this.segment.name}`;
  }
}
