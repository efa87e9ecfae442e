/** Decodes: reserves landings, goes on where prefill has ended, and sends a token per step. */

import type { Caller } from "../channels.js";
import type { Received } from "../wire/codec.js";
import type { KvLayout, Message, Region, TokenScore } from "../wire/messages.js";
import type { Filled } from "../wire/schema.js";
import type { Service, Worker } from "../worker.js";
import { type Llama, PagedKv } from "./llama.js";
import { chooseToken, type History, scoreOf } from "./sampling.js";

const MAX_RUNNING = 64;
/** What requests may ask of this worker; conductors send no others. */
const FEATURES = ["sampling", "logprobs", "penalties", "logit_bias", "min_tokens"];

/** Why a request is refused or has failed. */
type Code =
  | "no_room"
  | "too_long"
  | "draining"
  | "id_in_use"
  | "not_held"
  | "invalid"
  | "unsupported"
  | "preempted"
  | "expired";

type Received_<Tag> = Extract<Received, { type: Tag }>;
type ReserveDecode = Received_<"reserve_decode">;
type StartDecode = Received_<"start_decode">;

/** Pages that wait for a prompt's KV, and the key to write them. */
interface Landing {
  caller: Caller;
  pages: number[];
  region: Region;
  nTokens: number;
  stopping: ReserveDecode["stopping"];
  expires: number;
}

interface Running {
  caller: Caller;
  pages: number[];
  sampling: StartDecode["sampling"];
  stopping: ReserveDecode["stopping"];
  /** The newest token, whose KV is not computed yet, and its position. */
  token: number;
  position: number;
  /** New tokens of this try, the first one included. */
  nNew: number;
  /** All tokens before and with the newest, if the choice of the next depends on them. */
  history: History;
}

export class DecodeService implements Service {
  private readonly kv: PagedKv;
  private readonly pageBytes: number;
  private readonly nPages: number;
  /** Tokens of prompt and answer together, at the most. */
  private readonly longest: number;
  private readonly free: number[];
  /** Disjoint from `running`. */
  private readonly landings = new Map<string, Landing>();
  /** In the order of their starts. */
  private readonly running = new Map<string, Running>();
  private step = 0;
  private stepS = 0;
  private isStepping = false;

  constructor(
    private readonly worker: Worker,
    private readonly model: Llama,
    private readonly layout: KvLayout,
  ) {
    const { memory } = worker.pool;
    const floats = new Float32Array(memory.buffer, memory.byteOffset, memory.length / 4);
    this.kv = new PagedKv(floats, model, layout.block_size);
    this.pageBytes = 4 * this.kv.pageFloats;
    this.nPages = Math.floor(memory.length / this.pageBytes);
    this.free = Array.from({ length: this.nPages }, (_, i) => this.nPages - 1 - i);
    const decode_cost = { d0_s: 0.001, d1_s: 0.004, d2_s: 1e-6 };
    // The last token's KV is never computed.
    this.longest = Math.min(model.maxContext, this.nPages * layout.block_size + 1);
    Object.assign(worker.record, {
      layout,
      model: worker.settings.servedModelName,
      features: FEATURES,
      max_context: model.maxContext,
      n_blocks: this.nPages,
      decode_cost,
    });
  }

  handle(message: Received, caller: Caller): void {
    switch (message.type) {
      case "reserve_decode": {
        const answer = this.reserve(message, caller);
        if (answer) this.worker.send(caller, answer);
        return;
      }
      case "start_decode":
        return this.start(message, caller);
      case "cancel":
        return this.cancel(message.request_id, caller);
      default:
        console.error(`a decode worker does not take ${message.type}`);
    }
  }

  tick(now: number): void {
    for (const [id, landing] of this.landings) {
      if (landing.expires <= now) {
        this.fail(id, landing.caller, "expired", "its KV did not land in time");
      }
    }
  }

  load(): Message {
    const positions = [...this.running.values()].map(({ position }) => position + 1);
    return {
      type: "decode_load",
      n_running: this.running.size,
      n_reserved: this.landings.size,
      context_tokens: positions.reduce((sum, n) => sum + n, 0),
      free_pages: this.free.length,
      n_pages: this.nPages,
      step_s: this.stepS,
    };
  }

  forget(caller: Caller): void {
    for (const [id, held] of [...this.landings, ...this.running]) {
      if (held.caller === caller) this.drop(id);
    }
  }

  isIdle(): boolean {
    return this.landings.size + this.running.size === 0;
  }

  private reserve(asked: ReserveDecode, caller: Caller): Message | null {
    const { request_id, n_tokens, stopping } = asked;
    const n = Math.ceil(n_tokens / this.layout.block_size);
    const longest = n_tokens + stopping.max_new_tokens;
    const held = this.running.size + this.landings.size;
    const now = performance.now() / 1000;
    const refuse = (code: Code, reason: string): Message => {
      const retryable = code !== "too_long";
      return { type: "decode_refused", request_id, code, reason, retryable };
    };
    const earlier = this.landings.get(request_id) ?? this.running.get(request_id);
    if (earlier?.caller === caller) return null; // said twice
    if (earlier) return refuse("id_in_use", `the id ${request_id} is in use`);
    if (this.worker.record.draining) return refuse("draining", "this worker is about to leave");
    if (longest > this.longest) {
      return refuse("too_long", `${longest} tokens, and ${this.longest} is the limit`);
    }
    if (held >= MAX_RUNNING) return refuse("no_room", `${held} requests are here already`);
    // Each request may need a page more at its next step.
    if (n + held + 1 > this.free.length) {
      return refuse("no_room", `${n} pages wanted, ${this.free.length} of ${this.nPages} are free`);
    }
    const pages = this.free.splice(-n);
    const region = this.worker.pool.toWrite(pages, this.pageBytes);
    const expires = now + this.worker.settings.landingS;
    this.landings.set(request_id, { caller, pages, region, nTokens: n_tokens, stopping, expires });
    const landing = { region, pages, layout: this.layout };
    return { type: "decode_reserved", request_id, landing, expires_s: expires - now };
  }

  private start(start: StartDecode, caller: Caller): void {
    const { request_id, first_token, sampling, n_prompt, history } = start;
    if (this.running.get(request_id)?.caller === caller) return; // said twice
    const landing = this.landings.get(request_id);
    if (landing?.caller !== caller) {
      return this.sayFailed(request_id, caller, "not_held", "no landing is held for it here");
    }
    const fault = this.faultOf(start, landing);
    if (fault) return this.fail(request_id, caller, "invalid", fault);
    const refusal = unsupported(start);
    if (refusal) return this.fail(request_id, caller, "unsupported", `${refusal} is not done here`);
    this.worker.pool.revoke(landing.region);
    this.landings.delete(request_id);
    this.running.set(request_id, {
      caller,
      pages: landing.pages,
      sampling,
      stopping: landing.stopping,
      token: first_token,
      position: landing.nTokens,
      nNew: 1,
      history: { tokens: [...history, first_token], nPrompt: n_prompt },
    });
    this.wake();
  }

  private faultOf({ first_token, n_prompt, sampling, history }: StartDecode, landing: Landing) {
    const { nVocabulary } = this.model;
    const tokens = [first_token, ...history, ...sampling.logit_bias.map(([token]) => token)];
    const foreign = tokens.find((token) => token >= nVocabulary);
    if (foreign !== undefined) return `token ${foreign}, and the vocabulary has ${nVocabulary}`;
    if (n_prompt > landing.nTokens) {
      return `n_prompt is ${n_prompt}, and ${landing.nTokens} tokens were reserved`;
    }
    if (penalises(sampling) && history.length !== landing.nTokens) {
      return `history has ${history.length} tokens, and ${landing.nTokens} were reserved`;
    }
    return "";
  }

  private cancel(id: string, caller: Caller): void {
    const held = this.landings.get(id) ?? this.running.get(id);
    // A landing in doubt needs no rest: its key opens nothing from here on.
    if (held?.caller === caller) this.drop(id);
  }

  private fail(id: string, caller: Caller, code: Code, reason: string): void {
    this.drop(id);
    this.sayFailed(id, caller, code, reason);
  }

  private sayFailed(request_id: string, caller: Caller, code: Code, reason: string): void {
    // Not the field `invalid`: what is wrong here may be the conductor's doing.
    const failed = { request_id, code, reason, retryable: code !== "invalid" };
    this.worker.send(caller, { type: "decode_failed", ...failed });
  }

  /** Forgets a request, and frees its pages. */
  private drop(id: string): void {
    const landing = this.landings.get(id);
    if (landing) this.worker.pool.revoke(landing.region);
    this.free.push(...((landing ?? this.running.get(id))?.pages ?? []));
    this.landings.delete(id);
    this.running.delete(id);
  }

  /** Runs steps until no request is left; messages are read between two steps. */
  private wake(): void {
    if (this.isStepping) return;
    this.isStepping = true;
    const next = () => {
      this.runStep();
      if (this.running.size > 0) setImmediate(next);
      else this.isStepping = false;
    };
    setImmediate(next);
  }

  private runStep(): void {
    const started = performance.now();
    const produced = new Map<Caller, [string, number, "" | "stop" | "length"][]>();
    const scores = new Map<Caller, [string, TokenScore][]>();
    for (const [id, run] of this.running) {
      if (!this.hasPage(run)) {
        this.fail(id, run.caller, "preempted", "no page is free");
        continue;
      }
      const logits = this.model.forward(run.token, run.position, this.kv, run.pages);
      run.position++;
      const { stop_token_ids, min_new_tokens } = run.stopping;
      const masked = run.nNew < min_new_tokens ? stop_token_ids : [];
      run.token = chooseToken(logits, run.sampling, run.position, run.history, masked);
      run.nNew++;
      run.history.tokens.push(run.token);
      const finish = finishOf(run);
      listOf(produced, run.caller).push([id, run.token, finish]);
      if (run.sampling.logprobs !== null) {
        listOf(scores, run.caller).push([id, scoreOf(logits, run.token, run.sampling.logprobs)]);
      }
      if (finish) this.drop(id);
    }
    this.stepS = (performance.now() - started) / 1000;
    this.step++;
    for (const [caller, tokens] of produced) {
      const known = scores.get(caller) ?? [];
      this.worker.send(caller, {
        type: "tokens_produced",
        step: this.step,
        produced: tokens,
        scores: known,
      });
    }
  }

  /** Takes the page of the newest token, if it begins one. */
  private hasPage(run: Running): boolean {
    if (run.position < run.pages.length * this.layout.block_size) return true;
    const page = this.free.pop();
    if (page !== undefined) run.pages.push(page);
    return page !== undefined;
  }
}

function finishOf({ stopping, token, nNew }: Running): "" | "stop" | "length" {
  if (stopping.stop_token_ids.includes(token)) return "stop";
  return nNew >= stopping.max_new_tokens ? "length" : "";
}

/** Returns the name of what another worker may have, and this one has not. */
function unsupported({ sampling, kv_transfer_params }: StartDecode): string {
  if (sampling.grammar) return "grammar";
  return kv_transfer_params ? "kv_transfer_params" : "";
}

function penalises(sampling: Filled<StartDecode["sampling"]>): boolean {
  const { repetition_penalty, presence_penalty, frequency_penalty } = sampling;
  return repetition_penalty !== 1 || presence_penalty !== 0 || frequency_penalty !== 0;
}

function listOf<V>(lists: Map<Caller, V[]>, caller: Caller): V[] {
  const list = lists.get(caller) ?? [];
  lists.set(caller, list);
  return list;
}
