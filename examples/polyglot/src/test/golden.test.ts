/** Compares with the golden files of the protocol, and with the values in docs/protocol.md. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { chooseToken, uniformDraw, weightOf } from "../decode/sampling.js";
import { proofOf } from "../transfer/handshake.js";
import { RecordLayer, recordKeys } from "../transfer/records.js";
import { blockHashes, rootHash } from "../wire/block_hashes.js";
import { ClusterKey, rawPublicKey, x25519, z85 } from "../wire/cluster_key.js";
import { decode, encode, unpack } from "../wire/codec.js";
import { eventFrames, type KvEvent } from "../wire/kv_events.js";
import type { Sampling } from "../wire/messages.js";
import { checked, type Filled, Malformed } from "../wire/schema.js";

const FOLDER = new URL("../../../../libs/protocol/golden/", import.meta.url);

function golden(name: string) {
  return JSON.parse(readFileSync(new URL(name, FOLDER), "utf8"));
}

/** As the golden JSON has it: bytes in base64, and no bigints. */
function asJson(value: unknown): unknown {
  const text = JSON.stringify(value, (_, inner) => {
    if (typeof inner === "bigint") return Number(inner);
    return inner instanceof Uint8Array ? Buffer.from(inner).toString("base64") : inner;
  });
  return JSON.parse(text);
}

/** Every field of the golden JSON is in the message; the message has defaults besides. */
function assertContains(message: unknown, wanted: unknown): void {
  if (wanted === null || typeof wanted !== "object") {
    assert.deepEqual(message, wanted);
    return;
  }
  for (const [key, value] of Object.entries(wanted)) {
    assertContains((message as Record<string, unknown>)[key], value);
  }
}

test("golden frames are decoded to their JSON, and encoded to what decodes the same", () => {
  for (const { frame_hex, json } of golden("messages.json")) {
    const message = decode(Buffer.from(frame_hex, "hex"));
    // Buffers would become objects here.
    const plain = asJson(structuredCloneOf(message));
    assertContains(plain, json);
    assert.deepEqual(decode(encode(message)), message);
  }
});

/** Buffers have a toJSON of their own. */
function structuredCloneOf(value: unknown): unknown {
  if (value instanceof Uint8Array) return new Uint8Array(value);
  if (Array.isArray(value)) return value.map(structuredCloneOf);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, structuredCloneOf(v)]));
}

test("a frame that breaks the schema is malformed", () => {
  const hello = { type: "hello", conductor_id: "c", session: 1 } as const;
  assert.equal(decode(encode(hello)).type, "hello");
  for (const wrong of [{ session: -1 }, { session: 0.5 }, { conductor_id: "c".repeat(513) }]) {
    assert.throws(() => decode(encode({ ...hello, ...wrong })), Malformed);
  }
  assert.throws(() => decode(Buffer.from("0281a474797065a568656c6c6f", "hex")), Malformed);
  assert.throws(() => checked({ temperature: Number.NaN }, "Sampling"), Malformed);
});

test("block hashes are equal to the bit", () => {
  for (const { model, salt, block_size, token_ids, root_hex, hashes_hex } of golden(
    "block_hashes.json",
  )) {
    const root = rootHash(model, salt, block_size);
    assert.equal(root.toString("hex"), root_hex);
    const hashes = blockHashes(root, token_ids, block_size);
    assert.deepEqual(
      hashes.map((hash) => hash.toString("hex")),
      hashes_hex,
    );
  }
});

test("KV events are equal to the byte", () => {
  const frames: { payload_hex: string; sequence_hex: string }[] = golden("kv_events.json");
  frames.forEach(({ payload_hex, sequence_hex }, i) => {
    const payload = Buffer.from(payload_hex, "hex");
    const [timestamp, events] = unpack(payload) as [number, KvEvent[]];
    const [sequence, written] = eventFrames(BigInt(i), timestamp, events);
    assert.equal(sequence.toString("hex"), sequence_hex);
    assert.deepEqual(unpack(written), unpack(payload));
  });
});

test("CURVE keys and the key's id follow from the cluster key", () => {
  const key = new ClusterKey("0123456789abcdef0123456789abcdef");
  assert.equal(key.id, "ac09f77b7f8f7373");
  const secrets = {
    port: "0ad085de79fbe28f6c2f2364e88daa3ef06685f583a0bf75b064ad9554f2fdea",
    caller: "c9985eecf56b41f7ff5ec2c37f540a9c5da91088588c285fda559f1072d39ccb",
  } as const;
  for (const side of ["port", "caller"] as const) {
    assert.equal(key.curvePair(side).secretKey, z85(Buffer.from(secrets[side], "hex")));
  }
});

test("records of an encrypted connection are the golden bytes", async () => {
  const key = new ClusterKey("the moon is made of green cheese");
  const [initiator, owner] = [x25519(Buffer.alloc(32, 1)), x25519(Buffer.alloc(32, 2))];
  const salt = proofOf(key, "records", Buffer.from("asked"), Buffer.from("answered"));
  const keys = recordKeys(owner, rawPublicKey(initiator), salt);
  assert.equal(
    keys.initiator.toString("hex"),
    "e4ed4b8611c9c6d157b9d612d232e5d7b387d2991a465f60fe39e7e403326dff",
  );
  assert.equal(
    keys.owner.toString("hex"),
    "cba629e9815af040e0f281c08b6d668560b31b4986b0b8c0911662775140d911",
  );
  const ordered = Buffer.from(Array.from({ length: 32 }, (_, i) => 32 + i));
  const sealing = new RecordLayer(ordered);
  const sealed = Buffer.concat(
    ["halfmoon", "rises"].map((text) => sealing.seal(Buffer.from(text))),
  );
  assert.equal(
    sealed.toString("hex"),
    "080000008b4f8d3ff9300b37fd95cb20d4a6e15447a8424975c866b1" +
      "05000000e9fc5776f2a274534b947a82b3393f3996a0161d64",
  );
  let at = 0;
  const opening = new RecordLayer(ordered);
  const read = async (n: number) => {
    at += n;
    return sealed.subarray(at - n, at);
  };
  assert.equal((await opening.open(read)).toString(), "halfmoon");
  assert.equal((await opening.open(read)).toString(), "rises");
});

test("seeded draws choose the golden tokens", () => {
  const { dice, weights, choices } = golden("draws.json");
  for (const { seed, position, die } of dice) {
    assert.equal(uniformDraw(BigInt(seed), position), die);
  }
  for (const { score, highest, temperature, weight_times_2_33 } of weights) {
    assert.equal(weightOf(score, highest, temperature) * 2 ** 33, weight_times_2_33);
  }
  const logits = Float32Array.from(choices.logits);
  const history = { tokens: choices.history, nPrompt: choices.n_prompt };
  for (const { sampling, tokens } of choices.cases) {
    const filled = checked(sampling, "Sampling") as Filled<Sampling>;
    const chosen = tokens.map((_: number, i: number) => {
      return chooseToken(logits, filled, choices.first_position + i, history);
    });
    assert.deepEqual(chosen, tokens);
  }
});
