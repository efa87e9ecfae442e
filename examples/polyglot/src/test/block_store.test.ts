/** A kvstore's decisions, without sockets and with a time of the test's own. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { BlockStore, LEASE_S, RESERVATION_S, Refusal } from "../kvstore/block_store.js";
import { READ, Status, WRITE } from "../transfer/frames.js";
import { PageGrants } from "../transfer/page_grants.js";
import type { Region } from "../wire/messages.js";

const LAYOUT = {
  model: "m",
  n_layers: 1,
  n_kv_heads: 1,
  head_dim: 2,
  dtype: "float32",
  block_size: 16,
} as const;
const BLOCK_BYTES = 256;

function storeOf(nBlocks: number): { store: BlockStore; pool: PageGrants } {
  const pool = new PageGrants("kvstore-0", 1, Buffer.alloc(nBlocks * BLOCK_BYTES));
  const store = new BlockStore(pool);
  store.adopt(LAYOUT);
  return { store, pool };
}

/** Puts blocks as a client does, and returns the hashes that are stored by it. */
function put(store: BlockStore, hashes: string[], parent: string | null = null, now = 0): string[] {
  const { places } = store.reserve("put", hashes, parent, now);
  store.commit(
    "put",
    places.map(() => 1n),
  );
  return places.map(([hash]) => Buffer.from(hash).toString("hex"));
}

test("the least recently used blocks go first, children before parents", () => {
  const { store } = storeOf(4);
  put(store, ["a0", "a1"]);
  put(store, ["b0", "b1"]);
  store.lease("get", ["a0", "a1"], 1);
  store.end("get");
  assert.deepEqual(put(store, ["c0"]), ["c0"]);
  assert.deepEqual(new Set(store.hashes()), new Set(["a0", "a1", "b0", "c0"]));
  assert.deepEqual(put(store, ["d0", "d1"]), ["d0", "d1"]);
  assert.deepEqual(new Set(store.hashes()), new Set(["a0", "c0", "d0", "d1"]));
});

test("a leased block is not evicted, and a put without any room is refused", () => {
  const { store } = storeOf(2);
  put(store, ["a0", "a1"]);
  store.lease("get", ["a0", "a1"], 0);
  assert.throws(() => store.reserve("put", ["b0"], null, 0), Refusal);
  store.expire(LEASE_S);
  const { places, notStored } = store.reserve("put", ["b0", "b1", "b2"], null, LEASE_S);
  assert.equal(places.length, 2);
  assert.deepEqual(notStored, ["b2"]);
});

test("a put's key writes and reads the places of its ticket until the ticket ends", () => {
  const { store, pool } = storeOf(4);
  const judge = (op: number, region: Region, page: number) => {
    const key = Buffer.from(region.key).toString("hex");
    return pool.judge(op, { key, offset: page * BLOCK_BYTES, length: BLOCK_BYTES, sum: 0n });
  };
  const { region } = store.reserve("put", ["a0", "a1"], null, 0);
  assert.equal(judge(WRITE, region, 1), Status.Ok);
  assert.equal(judge(WRITE, region, 2), Status.NotGranted);
  assert.equal(judge(READ, region, 1), Status.Ok);
  assert.equal(judge(READ, region, 2), Status.NotGranted);
  store.expire(RESERVATION_S);
  assert.equal(judge(WRITE, region, 1), Status.UnknownKey);
  assert.equal(store.roomBytes, 4 * BLOCK_BYTES);
});

test("a hash that a lease names twice counts once", () => {
  const { store } = storeOf(4);
  put(store, ["a0", "a1"]);
  assert.equal(store.lease("get", ["a0", "a0", "a1"], 0).places.length, 2);
  assert.equal(store.counts.found, 2);
});

test("a block that would be its own ancestor is refused", () => {
  const { store } = storeOf(4);
  put(store, ["a0"], "a1");
  assert.throws(() => store.reserve("put", ["a1"], "a0", 0), Refusal);
});
