/** Holds blocks, and decides which are stored, leased and evicted. It has no socket and no clock. */

import { xxh3 } from "../transfer/checksum.js";
import type { PageGrants } from "../transfer/page_grants.js";
import type { KvEvent } from "../wire/kv_events.js";
import type { KvLayout, Region } from "../wire/messages.js";

export const RESERVATION_S = 30;
export const LEASE_S = 10;
const RETRY_S = 1;
const ITEM_BYTES = { float32: 4, bfloat16: 2, float16: 2 };

/** What was asked for can't be done; the text is for the client. */
export class Refusal extends Error {
  constructor(
    readonly code:
      | "invalid"
      | "id_in_use"
      | "not_held"
      | "no_room"
      | "draining"
      | "layout_mismatch",
    reason: string,
    readonly retryAfterS = 0,
  ) {
    super(reason);
  }
}

interface Block {
  hash: string;
  parent: string | null;
  page: number;
  checksum: bigint;
  leases: number;
  /** Evicted while it was leased: its page is free once it is read no more. */
  isEvicted: boolean;
}

/** Pages and a key to write them, until the commit. */
interface Reservation {
  kind: "reservation";
  blocks: Block[];
  region: Region;
  expires: number;
}

/** Blocks and a key to read them. */
interface Lease {
  kind: "lease";
  blocks: Block[];
  region: Region;
  expires: number;
}

export interface Granted {
  region: Region;
  places: [Uint8Array, number, bigint][];
}

export class BlockStore {
  layout: KvLayout | null = null;
  blockBytes = 0;
  nBlocks = 0;
  readonly counts = { found: 0, missing: 0 };
  /** What was stored and removed since the events were last taken. */
  private events: KvEvent[] = [];
  private free: number[] = [];
  /** Served blocks, the one to evict first at the front: a block's children are before it. */
  private readonly blocks = new Map<string, Block>();
  /** How many blocks, stored or reserved, continue the one with this hash. */
  private readonly children = new Map<string, number>();
  /** Blocks that are being written. Disjoint from `blocks`. */
  private readonly reserved = new Map<string, Block>();
  private readonly tickets = new Map<string, Reservation | Lease>();

  constructor(private readonly pool: PageGrants) {}

  /** Takes the layout of the first put, for good. */
  adopt(layout: KvLayout): void {
    const { n_layers, block_size, n_kv_heads, head_dim, dtype } = layout;
    this.blockBytes = n_layers * 2 * block_size * n_kv_heads * head_dim * ITEM_BYTES[dtype];
    this.nBlocks = Math.floor(this.pool.memory.length / this.blockBytes);
    this.free = Array.from({ length: this.nBlocks }, (_, i) => this.nBlocks - 1 - i);
    this.layout = layout;
  }

  /** Makes room for those blocks that are missing; the first ones if not all of them fit. */
  reserve(ticket: string, hashes: string[], parent: string | null, now: number) {
    this.mustBeNew(ticket);
    this.mustBeChain(hashes, parent);
    this.touch(hashes.flatMap((hash) => this.blocks.get(hash) ?? []));
    const kept = new Set([...hashes, parent]);
    const blocks: Block[] = [];
    const notStored: string[] = [];
    let isFull = false;
    hashes.forEach((hash, i) => {
      if (this.blocks.has(hash)) return;
      const isWritten = this.reserved.has(hash);
      const page = isFull || isWritten ? undefined : this.takePage(kept);
      isFull ||= page === undefined && !isWritten;
      if (page === undefined) notStored.push(hash);
      else {
        const before = i > 0 ? hashes[i - 1] : parent;
        blocks.push({ hash, parent: before, page, checksum: 0n, leases: 0, isEvicted: false });
      }
    });
    if (isFull && blocks.length === 0) {
      throw new Refusal("no_room", `no page of ${this.nBlocks} is free`, RETRY_S);
    }
    for (const block of blocks) {
      this.reserved.set(block.hash, block);
      this.count(block.parent, 1);
    }
    const region = this.pool.toWriteAndRead(pagesOf(blocks), this.blockBytes);
    this.tickets.set(ticket, { kind: "reservation", blocks, region, expires: now + RESERVATION_S });
    return { ...this.granted(region, blocks), notStored };
  }

  /** Serves the blocks of a reservation from now on. Readers compare the checksums. */
  commit(ticket: string, checksums: bigint[]): void {
    const found = this.tickets.get(ticket);
    if (found?.kind !== "reservation") {
      throw new Refusal("not_held", `no reservation has the ticket ${ticket}`);
    }
    const { blocks } = found;
    if (blocks.length !== checksums.length) {
      throw new Refusal("invalid", `${checksums.length} checksums for ${blocks.length} blocks`);
    }
    this.pool.revoke(found.region);
    this.tickets.delete(ticket);
    blocks.forEach((block, i) => {
      block.checksum = checksums[i];
      this.reserved.delete(block.hash);
      this.blocks.set(block.hash, block);
      this.events.push({
        type: "BlockStored",
        block_hashes: [Buffer.from(block.hash, "hex")],
        parent_block_hash: block.parent === null ? null : Buffer.from(block.parent, "hex"),
        token_ids: [],
        block_size: this.layout?.block_size ?? 0,
        medium: "CPU",
      });
    });
    this.touch(blocks);
  }

  /** Holds the longest stored prefix, perhaps of no block; a hash that comes twice counts once. */
  lease(ticket: string, asked: string[], now: number): Granted {
    this.mustBeNew(ticket);
    const hashes = [...new Set(asked)];
    const end = hashes.findIndex((hash) => !this.blocks.has(hash));
    const held = end < 0 ? hashes : hashes.slice(0, end);
    const blocks = held.map((hash) => this.blocks.get(hash) as Block);
    for (const block of blocks) block.leases++;
    this.touch(blocks);
    this.counts.found += blocks.length;
    this.counts.missing += hashes.length - blocks.length;
    const region = this.pool.toRead(pagesOf(blocks), this.blockBytes);
    // A lease of nothing leaves its ticket free.
    if (blocks.length > 0) {
      this.tickets.set(ticket, { kind: "lease", blocks, region, expires: now + LEASE_S });
    }
    return this.granted(region, blocks);
  }

  /** Holds a lease or a reservation for as long again; returns for how long. */
  renew(ticket: string, now: number): number {
    const found = this.tickets.get(ticket);
    if (!found) throw new Refusal("not_held", `nothing has the ticket ${ticket}`);
    const seconds = found.kind === "lease" ? LEASE_S : RESERVATION_S;
    found.expires = now + seconds;
    return seconds;
  }

  /** Ends a lease or a reservation; unknown tickets are fine. */
  end(ticket: string, kind?: "lease" | "reservation"): void {
    const found = this.tickets.get(ticket);
    if (!found || (kind && found.kind !== kind)) return;
    this.pool.revoke(found.region);
    this.tickets.delete(ticket);
    for (const block of found.blocks) {
      if (found.kind === "lease") this.release(block);
      else this.discard(block);
    }
  }

  expire(now: number): void {
    for (const [ticket, { expires }] of this.tickets) if (expires <= now) this.end(ticket);
  }

  /** Evicts those of the blocks whose bytes are not what their checksums say. */
  verify(hashes: string[]): void {
    for (const hash of hashes) {
      const block = this.blocks.get(hash);
      if (block && this.sumOf(block) !== block.checksum) this.evict(block);
    }
  }

  takeEvents(): KvEvent[] {
    const taken = this.events;
    this.events = [];
    return taken;
  }

  hashes(): string[] {
    return [...this.blocks.keys()];
  }

  get nStored(): number {
    return this.blocks.size;
  }

  get nReserved(): number {
    return this.reserved.size;
  }

  get nLeased(): number {
    return [...this.blocks.values()].filter(({ leases }) => leases > 0).length;
  }

  get isIdle(): boolean {
    return this.tickets.size === 0;
  }

  /** Bytes of blocks that fit without evicting others. */
  get roomBytes(): number {
    return this.layout ? this.free.length * this.blockBytes : this.pool.memory.length;
  }

  private takePage(kept: Set<string | null>): number | undefined {
    if (this.free.length === 0) {
      for (const block of this.blocks.values()) {
        if (block.leases > 0 || this.children.has(block.hash) || kept.has(block.hash)) continue;
        this.evict(block);
        break;
      }
    }
    return this.free.pop();
  }

  private evict(block: Block): void {
    this.blocks.delete(block.hash);
    this.events.push({
      type: "BlockRemoved",
      block_hashes: [Buffer.from(block.hash, "hex")],
      medium: "CPU",
    });
    this.count(block.parent, -1);
    block.isEvicted = true;
    if (block.leases === 0) this.free.push(block.page);
  }

  private release(block: Block): void {
    block.leases--;
    if (block.isEvicted && block.leases === 0) this.free.push(block.page);
  }

  private discard(block: Block): void {
    this.reserved.delete(block.hash);
    this.count(block.parent, -1);
    this.free.push(block.page);
  }

  /** Makes blocks of a chain the last to be evicted, the first of the chain last of all. */
  private touch(blocks: Block[]): void {
    for (const block of blocks.toReversed()) {
      this.blocks.delete(block.hash);
      this.blocks.set(block.hash, block);
    }
  }

  private count(hash: string | null, change: number): void {
    if (hash === null) return;
    const n = (this.children.get(hash) ?? 0) + change;
    if (n > 0) this.children.set(hash, n);
    else this.children.delete(hash);
  }

  private sumOf({ page }: Block): bigint {
    return xxh3(this.pool.memory.subarray(page * this.blockBytes, (page + 1) * this.blockBytes));
  }

  private granted(region: Region, blocks: Block[]): Granted {
    const places = blocks.map(({ hash, page, checksum }): [Uint8Array, number, bigint] => {
      return [Buffer.from(hash, "hex"), page * this.blockBytes, checksum];
    });
    return { region, places };
  }

  private mustBeNew(ticket: string): void {
    if (this.tickets.has(ticket)) throw new Refusal("id_in_use", `the ticket ${ticket} is in use`);
  }

  /** A block that is its own ancestor could never be evicted. */
  private mustBeChain(hashes: string[], parent: string | null): void {
    const chain = new Set(hashes);
    if (chain.size !== hashes.length) throw new Refusal("invalid", "a hash comes twice");
    let before = parent;
    while (before !== null) {
      if (chain.has(before)) throw new Refusal("invalid", `${before} is its own ancestor`);
      before = (this.blocks.get(before) ?? this.reserved.get(before))?.parent ?? null;
    }
  }
}

function pagesOf(blocks: Block[]): number[] {
  return blocks.map(({ page }) => page);
}
