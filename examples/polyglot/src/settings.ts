/** Reads what a worker is told at its start: options, or the environment's HALFMOON_ variables. */

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { BlockList } from "node:net";
import { hostname, networkInterfaces } from "node:os";
import { parseArgs } from "node:util";
import { ClusterKey } from "./wire/cluster_key.js";
import type { WorkerInfo } from "./wire/messages.js";

export interface Settings {
  workerId: string;
  /** Address of the command and event sockets, which peers dial. */
  host: string;
  transferHost: string;
  metadataUrl: string;
  clusterKey?: ClusterKey;
  encryptsTransfers: boolean;
  /** Memory for blocks or pages. */
  capacityBytes: number;
  /** How long a stop waits for what is under way. */
  drainS: number;
  hostName: string;
  /** Folder of the model, of a decode worker. */
  model: string;
  /** What clients call the model. */
  servedModelName: string;
  /** Tokens of a page, of a decode worker. */
  blockSize: number;
  /** How long a decode worker holds pages for a prompt's KV. */
  landingS: number;
}

const OPTIONS = [
  "worker-id",
  "host",
  "transfer-host",
  "metadata",
  "capacity-mib",
  "model",
  "drain-s",
  "block-size",
  "served-model-name",
  "landing-ttl-s",
];

export function readSettings(role: WorkerInfo["role"]): Settings {
  const options = Object.fromEntries(OPTIONS.map((name) => [name, { type: "string" as const }]));
  const { values } = parseArgs({ options });
  const value = (name: string, otherwise: string): string => {
    const variable = `HALFMOON_${name.replaceAll("-", "_").toUpperCase()}`;
    return (values[name] as string | undefined) ?? (process.env[variable] || otherwise);
  };
  const host = ownAddress(value("host", "127.0.0.1"));
  const key = process.env.HALFMOON_CLUSTER_KEY || keyFromFile();
  return {
    workerId: value("worker-id", `${role}-${randomUUID().slice(0, 8)}`),
    host,
    transferHost: ownAddress(value("transfer-host", host)),
    metadataUrl: withPasswordOfFile(value("metadata", "http://127.0.0.1:7999/metadata")),
    clusterKey: key ? new ClusterKey(key) : undefined,
    encryptsTransfers: process.env.HALFMOON_TRANSFER_ENCRYPTION !== "off",
    capacityBytes: Number(value("capacity-mib", "256")) * 2 ** 20,
    drainS: Number(value("drain-s", "30")),
    hostName: hostname(),
    model: value("model", ""),
    servedModelName: value("served-model-name", ""),
    landingS: Number(value("landing-ttl-s", "600")),
    blockSize: Number(value("block-size", "64")),
  };
}

function keyFromFile(): string {
  const file = process.env.HALFMOON_CLUSTER_KEY_FILE;
  return file ? readFileSync(file, "utf8").trim() : "";
}

/** Returns a URL such as redis://host/0?password_file=PATH with the password in place of its file. */
function withPasswordOfFile(url: string): string {
  const parsed = new URL(url);
  const file = parsed.searchParams.get("password_file");
  if (file === null) return url;
  parsed.searchParams.delete("password_file");
  parsed.password = readFileSync(file, "utf8").trim();
  return parsed.href;
}

/** Returns this machine's address in a network such as 172.30.16.0/24, or the address given. */
function ownAddress(host: string): string {
  const [network, prefix] = host.split("/");
  if (!prefix) return host;
  const wanted = new BlockList();
  wanted.addSubnet(network, Number(prefix));
  const own = Object.values(networkInterfaces()).flatMap((addresses) => addresses ?? []);
  const found = own.find(({ family, address }) => family === "IPv4" && wanted.check(address));
  if (!found) throw new Error(`no address of this machine is in ${host}`);
  return found.address;
}
