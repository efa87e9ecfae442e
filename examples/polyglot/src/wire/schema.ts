/** Checks values against the protocol's JSON Schema, and fills in what was left out. */

import { readFileSync } from "node:fs";

/** A message as it is received: fields with a default are there. */
export type Filled<T> = T extends Uint8Array
  ? T
  : T extends object
    ? { [K in keyof T]-?: Filled<T[K]> }
    : T;

interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  anyOf?: Schema[];
  const?: unknown;
  enum?: unknown[];
  type?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  default?: unknown;
  items?: Schema;
  prefixItems?: Schema[];
  minItems?: number;
  maxItems?: number;
  contentEncoding?: string;
  minLength?: number;
  maxLength?: number;
  pattern?: string;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
}

const FILE = process.env.HALFMOON_SCHEMA ?? "../../../../libs/protocol/schema/messages.json";
const DEFINITIONS = (JSON.parse(readFileSync(new URL(FILE, import.meta.url), "utf8")) as Schema)
  .$defs as Record<string, Schema>;

/** Type names by the messages' tags: `lease_blocks` is a `LeaseBlocks`. */
export const BY_TAG = new Map<unknown, string>();
for (const [name, { properties }] of Object.entries(DEFINITIONS)) {
  if (properties?.type?.const) BY_TAG.set(properties.type.const, name);
}

/** The value of a named type is not what the schema says. */
export class Malformed extends Error {}

/** Returns the value with its defaults, without unknown fields, or throws `Malformed`. */
export function checked(value: unknown, name: string): unknown {
  return check(value, DEFINITIONS[name], name);
}

function check(value: unknown, schema: Schema, at: string): unknown {
  if (schema.$ref) return check(value, DEFINITIONS[schema.$ref.split("/")[2]], at);
  if (schema.anyOf) {
    // The only unions inside of messages are "this or null".
    return value === null ? null : check(value, schema.anyOf[0], at);
  }
  if (schema.const !== undefined) return must(value === schema.const, value, at);
  if (schema.enum) return must(schema.enum.includes(value), value, at);
  switch (schema.type) {
    case "object":
      return checkObject(value, schema, at);
    case "array":
      return checkArray(value, schema, at);
    case "string":
      return schema.contentEncoding ? checkBytes(value, schema, at) : checkText(value, schema, at);
    case "integer":
      return checkInteger(value, schema, at);
    case "number":
      return checkNumber(value, schema, at);
    default:
      return must(typeof value === schema.type, value, at);
  }
}

function checkObject(value: unknown, schema: Schema, at: string): unknown {
  must(typeof value === "object" && value !== null && !ArrayBuffer.isView(value), value, at);
  const fields = value as Record<string, unknown>;
  const filled: Record<string, unknown> = {};
  for (const [key, inner] of Object.entries(schema.properties ?? {})) {
    if (Object.hasOwn(fields, key)) filled[key] = check(fields[key], inner, `${at}.${key}`);
    else if (schema.required?.includes(key)) throw new Malformed(`${at}.${key} is missing`);
    else filled[key] = check(inner.default, inner, `${at}.${key}`);
  }
  return filled;
}

function checkArray(value: unknown, schema: Schema, at: string): unknown {
  must(Array.isArray(value), value, at);
  const list = value as unknown[];
  must(list.length >= (schema.minItems ?? 0), value, at);
  if (!schema.prefixItems) {
    must(list.length <= (schema.maxItems ?? Infinity), value, at);
    return list.map((item) => check(item, schema.items as Schema, `${at}[]`));
  }
  return schema.prefixItems.map((part, i) =>
    check(i < list.length ? list[i] : part.default, part, `${at}[${i}]`),
  );
}

function checkBytes(value: unknown, schema: Schema, at: string): unknown {
  must(value instanceof Uint8Array, value, at);
  // The schema counts letters of base64.
  const letters = 4 * Math.ceil((value as Uint8Array).length / 3);
  must(letters >= (schema.minLength ?? 0), value, at);
  return must(letters <= (schema.maxLength ?? Infinity), value, at);
}

function checkText(value: unknown, schema: Schema, at: string): unknown {
  must(typeof value === "string", value, at);
  const text = value as string;
  must(text.length >= (schema.minLength ?? 0), value, at);
  must(text.length <= (schema.maxLength ?? Infinity), value, at);
  return must(!schema.pattern || new RegExp(schema.pattern).test(text), value, at);
}

function checkInteger(value: unknown, schema: Schema, at: string): unknown {
  must(typeof value === "bigint" || Number.isSafeInteger(value), value, at);
  must(isWithin(value as number | bigint, schema), value, at);
  return isWide(schema) ? BigInt(value as number | bigint) : Number(value);
}

function checkNumber(value: unknown, schema: Schema, at: string): unknown {
  const number = typeof value === "bigint" ? Number(value) : value;
  must(Number.isFinite(number) && isWithin(number as number, schema), value, at);
  return number;
}

/** Integers that a double can't hold are bigints: `scripts/make_types.js` has the same rule. */
function isWide({ minimum, maximum, exclusiveMaximum }: Schema): boolean {
  const limit = maximum ?? exclusiveMaximum ?? Infinity;
  return minimum !== undefined && limit > Number.MAX_SAFE_INTEGER;
}

function isWithin(value: number | bigint, schema: Schema): boolean {
  return (
    value >= (schema.minimum ?? -Infinity) &&
    value <= (schema.maximum ?? Infinity) &&
    value > (schema.exclusiveMinimum ?? -Infinity) &&
    value < (schema.exclusiveMaximum ?? Infinity)
  );
}

function must(holds: boolean, value: unknown, at: string): unknown {
  if (!holds) throw new Malformed(`${at} can't be ${String(value).slice(0, 100)}`);
  return value;
}
