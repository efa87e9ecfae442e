// Writes src/wire/messages.ts from the JSON Schema of the protocol; `--check` only compares.

import { readFileSync, writeFileSync } from "node:fs";
import { compile } from "json-schema-to-typescript";

const SCHEMA = new URL("../../../libs/protocol/schema/messages.json", import.meta.url);
const TYPES = new URL("../src/wire/messages.ts", import.meta.url);

/** Names the TypeScript type where JSON Schema has no word for it: bytes, and 64-bit numbers. */
function withTypes(node) {
  if (Array.isArray(node)) return node.map(withTypes);
  if (node === null || typeof node !== "object") return node;
  if (node.contentEncoding === "base64") return { tsType: "Uint8Array" };
  if (isWide(node)) return { tsType: "bigint" };
  const { prefixItems, minItems: _, maxItems: __, ...plain } = node;
  if (prefixItems) {
    // The generator knows a tuple by the older word. All parts are sent, those with defaults too.
    const n = prefixItems.length;
    const parts = prefixItems.map(({ title, ...part }) => part);
    return { ...plain, items: withTypes(parts), minItems: n, maxItems: n };
  }
  return Object.fromEntries(Object.entries(plain).map(([key, value]) => [key, withTypes(value)]));
}

/** The same rule as in src/wire/schema.ts: an integer that a double can't hold. */
function isWide(node) {
  if (node.type !== "integer" || node.minimum === undefined) return false;
  return !((node.maximum ?? node.exclusiveMaximum) <= Number.MAX_SAFE_INTEGER);
}

const { discriminator: _, ...schema } = withTypes(JSON.parse(readFileSync(SCHEMA, "utf8")));
const written = await compile({ ...schema, title: "Message" }, "Message", {
  additionalProperties: false,
  unreachableDefinitions: true,
  bannerComment: "// Made by `npm run types` from libs/protocol/schema/messages.json. Do not edit.",
});
if (!process.argv.includes("--check")) writeFileSync(TYPES, written);
else if (readFileSync(TYPES, "utf8") !== written) {
  console.error("src/wire/messages.ts is not what the schema says: `npm run types`");
  process.exit(1);
}
