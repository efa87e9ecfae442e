/** Reads and writes records of the metadata server, over HTTP or in Redis. */

import { Redis } from "ioredis";
import type { ClusterKey } from "./wire/cluster_key.js";

export interface Metadata {
  get(key: string): Promise<string | null>;
  put(key: string, value: string, ttlS: number): Promise<void>;
  delete(key: string): Promise<void>;
  list(prefix: string): Promise<Map<string, string>>;
  /** Returns the counter under the key after it was counted up by one. */
  increment(key: string): Promise<number>;
  close(): void;
}

export function openMetadata(url: string, key?: ClusterKey): Metadata {
  return url.startsWith("redis") ? new RedisMetadata(url) : new HttpMetadata(url, key);
}

class HttpMetadata implements Metadata {
  private readonly headers: Record<string, string>;

  constructor(
    private readonly url: string,
    key?: ClusterKey,
  ) {
    this.headers = key ? { authorization: `Bearer ${key.metadataToken}` } : {};
  }

  async get(key: string): Promise<string | null> {
    const answer = await this.ask("GET", "", { key });
    return answer.status === 404 ? null : answer.text();
  }

  async put(key: string, value: string, ttlS: number): Promise<void> {
    await this.ask("PUT", "", { key, ttl_s: String(ttlS) }, value);
  }

  async delete(key: string): Promise<void> {
    await this.ask("DELETE", "", { key });
  }

  async list(prefix: string): Promise<Map<string, string>> {
    const records = (await (await this.ask("GET", "", { prefix })).json()) as Record<
      string,
      string
    >;
    const decoded = Object.entries(records).map(([key, value]): [string, string] => {
      return [key, Buffer.from(value, "base64").toString()];
    });
    return new Map(decoded);
  }

  async increment(key: string): Promise<number> {
    return (await (await this.ask("POST", "/increment", { key })).json()) as number;
  }

  close(): void {}

  private async ask(
    method: string,
    path: string,
    query: Record<string, string>,
    body?: string,
  ): Promise<Response> {
    const url = `${this.url}${path}?${new URLSearchParams(query)}`;
    const signal = AbortSignal.timeout(5000);
    const answer = await fetch(url, { method, body, headers: this.headers, signal });
    if (answer.ok || answer.status === 404) return answer;
    throw new Error(`${method} ${url}: ${answer.status} ${await answer.text()}`);
  }
}

class RedisMetadata implements Metadata {
  private readonly redis: Redis;

  constructor(url: string) {
    this.redis = new Redis(url);
    this.redis.on("error", (error) => console.error(`metadata: ${error.message}`));
  }

  get(key: string): Promise<string | null> {
    return this.redis.get(key);
  }

  async put(key: string, value: string, ttlS: number): Promise<void> {
    await this.redis.set(key, value, "PX", Math.round(1000 * ttlS));
  }

  async delete(key: string): Promise<void> {
    await this.redis.del(key);
  }

  async list(prefix: string): Promise<Map<string, string>> {
    const found = new Map<string, string>();
    const pattern = `${prefix.replace(/[\\*?[\]]/g, "\\$&")}*`;
    for await (const keys of this.redis.scanStream({ match: pattern })) {
      for (const key of keys as string[]) {
        const value = await this.redis.get(key);
        if (value !== null) found.set(key, value);
      }
    }
    return found;
  }

  increment(key: string): Promise<number> {
    return this.redis.incr(key);
  }

  close(): void {
    this.redis.disconnect();
  }
}
