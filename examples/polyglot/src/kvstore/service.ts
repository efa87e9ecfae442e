/** Answers the messages that a kvstore gets. */

import type { Caller } from "../channels.js";
import type { Received } from "../wire/codec.js";
import { eventFrames } from "../wire/kv_events.js";
import type { KvLayout, Message } from "../wire/messages.js";
import type { Service, Worker } from "../worker.js";
import { BlockStore, LEASE_S, RESERVATION_S, Refusal } from "./block_store.js";

const HASH_BYTES = 16;
const LAYOUT_FIELDS = [
  "model",
  "n_layers",
  "n_kv_heads",
  "head_dim",
  "dtype",
  "block_size",
] as const;

export class KvstoreService implements Service {
  private readonly store: BlockStore;
  /** The number of the last KV event. */
  private sequence = -1n;

  constructor(private readonly worker: Worker) {
    this.store = new BlockStore(worker.pool);
  }

  async handle(message: Received, caller: Caller): Promise<void> {
    try {
      const answer = await this.answer(message, caller);
      if (answer) this.worker.send(caller, answer);
    } catch (error) {
      if (!(error instanceof Refusal) || !("ticket" in message)) throw error;
      const { message: reason, code, retryAfterS: retry_after_s } = error;
      const { ticket } = message;
      this.worker.send(caller, { type: "kvstore_refused", ticket, reason, code, retry_after_s });
    }
    this.publishEvents();
  }

  tick(now: number): void {
    this.store.expire(now);
  }

  load(): Message {
    const { nStored: n_stored, nReserved: n_reserved, nLeased: n_leased, counts } = this.store;
    return {
      type: "kvstore_load",
      n_stored,
      n_reserved,
      n_leased,
      n_blocks: this.store.nBlocks,
      n_found_in_memory: counts.found,
      n_missing: counts.missing,
      sequence: this.sequence,
    };
  }

  /** Tickets of a connection that is down run out by themselves. */
  forget(): void {}

  isIdle(): boolean {
    return this.store.isIdle;
  }

  private async answer(message: Received, caller: Caller): Promise<Message | null> {
    const now = performance.now() / 1000;
    switch (message.type) {
      case "reserve_blocks": {
        const { ticket, hashes, parent, layout, token_ids } = message;
        if (this.worker.record.draining)
          throw new Refusal("draining", "this kvstore is about to leave");
        mustBeHashes(hashes);
        const nTokens = hashes.length * layout.block_size;
        if (token_ids.length !== nTokens) {
          throw new Refusal(
            "invalid",
            `token_ids has ${token_ids.length} tokens, the blocks ${nTokens}`,
          );
        }
        await this.mustHaveLayout(layout);
        const chain = hashes.map(hex);
        const before = parent === null ? null : hex(parent);
        const got = this.store.reserve(named(caller, ticket), chain, before, now);
        const not_stored = got.notStored.map((hash) => Buffer.from(hash, "hex"));
        const { region, places } = got;
        const expires_s = RESERVATION_S;
        return { type: "blocks_reserved", ticket, region, places, not_stored, expires_s };
      }
      case "commit_blocks":
        this.store.commit(named(caller, message.ticket), message.checksums);
        return { type: "blocks_committed", ticket: message.ticket };
      case "revoke_blocks":
        this.store.end(named(caller, message.ticket), "reservation");
        return null;
      case "lease_blocks": {
        const { ticket, hashes, layout } = message;
        mustBeHashes(hashes);
        if (this.store.layout) this.mustBeEqual(layout, this.store.layout);
        const { region, places } = this.store.lease(named(caller, ticket), hashes.map(hex), now);
        return { type: "blocks_leased", ticket, region, places, expires_s: LEASE_S };
      }
      case "renew_lease": {
        const expires_s = this.store.renew(named(caller, message.ticket), now);
        return { type: "lease_renewed", ticket: message.ticket, expires_s };
      }
      case "release_lease":
        this.store.end(named(caller, message.ticket), "lease");
        return null;
      case "verify_blocks":
        this.store.verify(message.hashes.map(hex));
        return null;
      case "snapshot_blocks":
        return {
          type: "blocks_snapshot",
          ticket: message.ticket,
          sequence: this.sequence,
          hashes: this.store.hashes().map((hash) => Buffer.from(hash, "hex")),
          room_bytes: this.store.roomBytes,
        };
      default:
        console.error(`a kvstore does not take ${message.type}`);
        return null;
    }
  }

  /** Takes the layout of the first put. While workers are there, only their layout will do. */
  private async mustHaveLayout(layout: KvLayout): Promise<void> {
    if (!this.store.layout) {
      const members = await this.worker.metadata.list("halfmoon/members/");
      for (const text of members.values()) {
        const { role, layout: theirs } = JSON.parse(text);
        if (role !== "kvstore" && theirs) this.mustBeEqual(layout, theirs);
      }
      this.store.adopt(layout);
      await this.worker.change({ layout, n_blocks: this.store.nBlocks });
    }
    this.mustBeEqual(layout, this.store.layout as KvLayout);
  }

  private mustBeEqual(layout: KvLayout, own: KvLayout): void {
    for (const field of LAYOUT_FIELDS) {
      if (layout[field] !== own[field]) {
        throw new Refusal(
          "layout_mismatch",
          `${field} is ${own[field]} here, and ${layout[field]} was asked for`,
        );
      }
    }
  }

  private publishEvents(): void {
    const events = this.store.takeEvents();
    if (events.length === 0) return;
    const frames = eventFrames(++this.sequence, Date.now() / 1000, events);
    this.worker.channels.publish(`kv@${this.worker.record.worker_id}`, ...frames);
  }
}

function mustBeHashes(hashes: Uint8Array[]): void {
  const wrong = hashes.find((hash) => hash.length !== HASH_BYTES);
  if (wrong) throw new Refusal("invalid", `a hash has ${wrong.length} bytes, not ${HASH_BYTES}`);
}

/** Tickets are unique on their connection only. */
function named(caller: Caller, ticket: string): string {
  return `${caller}/${ticket}`;
}

function hex(hash: Uint8Array): string {
  return Buffer.from(hash).toString("hex");
}
