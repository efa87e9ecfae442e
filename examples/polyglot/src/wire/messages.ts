// Made by `npm run types` from libs/protocol/schema/messages.json. Do not edit.

/**
 * One message of a frame, as a MessagePack map; byte strings are base64 in JSON. `x-unit` is the unit of a number. `format` is int64 or uint64 where a number may be over 2^53.
 */
export type Message =
  | Hello
  | Welcome
  | Unwelcome
  | WrongVersion
  | Cancel
  | ChangeRole
  | ReserveDecode
  | StartDecode
  | DecodeReserved
  | DecodeRefused
  | TokensProduced
  | DecodeFailed
  | DecodeLoad
  | StartPrefill
  | PrefillDone
  | PrefillFailed
  | PrefillStopped
  | PrefillLoad
  | StartShare
  | StopShare
  | ChunkSent
  | SlotFreed
  | ShareReady
  | ShareProgress
  | ShareDone
  | ShareKept
  | ShareEnded
  | ReserveBlocks
  | CommitBlocks
  | RevokeBlocks
  | LeaseBlocks
  | RenewLease
  | ReleaseLease
  | ReplicateBlocks
  | DropBlocks
  | VerifyBlocks
  | SnapshotBlocks
  | BlocksReserved
  | BlocksCommitted
  | BlocksLeased
  | LeaseRenewed
  | BlocksReplicated
  | KvstoreRefused
  | BlocksSnapshot
  | KvstoreLoad;
/**
 * One request's part of a step.
 *
 * @minItems 3
 * @maxItems 3
 */
export type Produced = [string, number, "" | "length" | "stop"];
/**
 * One token at its place in a sequence, as the model itself sees it.
 *
 *     Log probabilities are natural ones of the model's logits, before temperature, penalties,
 *     biases and truncation: what was drawn may be unlikely here.
 *
 * @minItems 3
 * @maxItems 3
 */
export type TokenScore = [number, number, [number, number][]];
/**
 * Where one block is, or is to be written.
 *
 * @minItems 3
 * @maxItems 3
 */
export type Place = [Uint8Array, number, bigint];

/**
 * The first message on a connection, answered by `Welcome`. What was asked for on an earlier
 *     connection of this name ends when that connection is down; while it is up, both are served.
 */
export interface Hello {
  /**
   * Name of the sender. Connections with one name are one conductor's.
   */
  conductor_id: string;
  /**
   * The highest version of the protocol that the conductor speaks.
   */
  max_version?: number;
  /**
   * The lowest version of the protocol that the conductor speaks.
   */
  min_version?: number;
  /**
   * Counts this conductor's connections to this worker.
   */
  session: number;
  /**
   * Names the type.
   */
  type: "hello";
}
/**
 * The answer to `Hello`; sent again whenever the worker's own record changes.
 */
export interface Welcome {
  /**
   * Names the type.
   */
  type: "welcome";
  worker: WorkerInfo;
}
/**
 * The worker's record, as in the metadata server.
 */
export interface WorkerInfo {
  /**
   * ZeroMQ endpoint of its ROUTER, for commands.
   */
  commands: string;
  /**
   * What computes its model, for operators: a library and its instruction set; empty: not said.
   */
  computes_with?: string;
  /**
   * Seconds that it takes for a step; none: the defaults of `DecodeCost`.
   */
  decode_cost?: DecodeCost | null;
  /**
   * True when it finishes its requests and takes no new ones.
   */
  draining?: boolean;
  /**
   * ZeroMQ endpoint of its PUB, for events.
   */
  events: string;
  /**
   * What it can do of what requests may ask for (`halfmoon_protocol.features`). None: all that workers of the first version could.
   */
  features?: string[] | null;
  /**
   * Counts the starts of this worker: a restart has a higher one.
   */
  generation: number;
  /**
   * The kvstore that this prefill worker prefers, by its settings.
   */
  home_kvstore?: string | null;
  /**
   * The machine it runs on: workers with equal hosts may share memory.
   */
  host: string;
  /**
   * URL of this worker's HTTP interface for operators; empty: it has none.
   */
  http?: string;
  /**
   * True when this decode worker handles `StartDecode.answer_chain`.
   */
  keeps_answers?: boolean;
  /**
   * True when this decode worker handles `ReserveDecode.block_hashes`.
   */
  keeps_pages?: boolean;
  /**
   * Id of the cluster key that its sockets serve with, of those that it has; empty: not said.
   */
  key_id?: string;
  /**
   * The layout of its KV bytes. A kvstore that has not stored anything yet has none.
   */
  layout?: KvLayout | null;
  /**
   * It computes such a rest in parts: the most seconds of a step and of the part computed with it; 0: the rest is computed in one step.
   */
  local_prefill_step_s?: number;
  /**
   * Mean seconds between tokens that its parts leave to running requests; 0: it promises none.
   */
  local_prefill_tbt_s?: number;
  /**
   * Longest uncached rest of a prompt, in tokens, that this decode worker computes beside its steps when it gets `StartPrefill` for a landing of its own; 0: it can't. If it can, its record states a `prefill_cost`.
   */
  local_prefill_tokens?: number;
  /**
   * Tokens of the longest context that the model allows.
   */
  max_context?: number;
  /**
   * The highest version of the protocol that it speaks.
   */
  max_version?: number;
  /**
   * The lowest version of the protocol that it speaks.
   */
  min_version?: number;
  /**
   * Name of the model it serves, as clients request it.
   */
  model?: string;
  /**
   * Blocks that its memory holds (pages of a pool, slots of a store).
   */
  n_blocks?: number;
  /**
   * Seconds that it takes for a prefill; none: the defaults of `PrefillCost`.
   */
  prefill_cost?: PrefillCost | null;
  /**
   * True when this kvstore handles `ReplicateBlocks` and `DropBlocks`.
   */
  replicates?: boolean;
  /**
   * What it does now.
   */
  role: "decode" | "kvstore" | "prefill";
  /**
   * Roles that it takes on after a `ChangeRole`, its present one among them; empty: it keeps its role.
   */
  roles?: ("decode" | "kvstore" | "prefill")[];
  /**
   * Workers with the same non-empty name are one server: what one of them holds is used by that server alone. A prompt that is prefilled there is decoded there, and no other worker reads the blocks of its kvstore or stores blocks in it.
   */
  server?: string;
  /**
   * True when this worker handles `StartPrefill.n_held_blocks`, and that of `StartShare`.
   */
  skips_held_blocks?: boolean;
  /**
   * The stage of this prefill worker in a group, besides whole prompts; None: it is in no group.
   */
  stage?: Stage | null;
  /**
   * True when it has the layers of its stage alone: it computes prompts of its group only.
   */
  stage_layers_only?: boolean;
  /**
   * Its name: the key of its record.
   */
  worker_id: string;
}
/**
 * Seconds of one step: d0 + d1·(requests in it) + d2·(context tokens in it).
 */
export interface DecodeCost {
  /**
   * Of each step.
   */
  d0_s?: number;
  /**
   * Of each request in it.
   */
  d1_s?: number;
  /**
   * Of each token that its requests attend to.
   */
  d2_s?: number;
}
/**
 * The shape and meaning of a KV block. Equal layouts mean interchangeable bytes.
 */
export interface KvLayout {
  /**
   * Tokens per block. Prompts are cut into 16 to 512; a receiver refuses others by name.
   */
  block_size: number;
  /**
   * Type of each of these numbers.
   */
  dtype: "bfloat16" | "float16" | "float32";
  /**
   * Numbers in one head's key, and in its value.
   */
  head_dim: number;
  /**
   * Fingerprint of config and weights: KV of another model is noise.
   */
  model: string;
  /**
   * Heads of keys and values in each layer.
   */
  n_kv_heads: number;
  /**
   * Layers whose keys and values a block has.
   */
  n_layers: number;
}
/**
 * Seconds to prefill n tokens of which p are cached: c0 + c1·(n-p) + c2·(n²-p²).
 */
export interface PrefillCost {
  /**
   * Of each prefill.
   */
  c0_s?: number;
  /**
   * Of each token that is not cached.
   */
  c1_s?: number;
  /**
   * Of each pair of tokens in n² - p²: attention to the tokens before.
   */
  c2_s?: number;
}
/**
 * One stage of a group of prefill workers that compute long prompts together.
 *
 *     The layers are cut into `n_stages` runs, the last of which may be longer than others (see
 *     `halfmoon_protocol.stage_layers`). A prompt is cut into chunks, and while one stage computes a
 *     chunk, the stage before it computes the next one.
 */
export interface Stage {
  /**
   * Tokens of a chunk at the most.
   */
  chunk_tokens?: number;
  /**
   * The first layer of this stage, from 0. A group works if the runs of all its stages join up.
   */
  first_layer?: number;
  /**
   * Name of the group; it can work when all its stages are there.
   */
  group: string;
  /**
   * Seconds in which a chunk's activations are sent from one stage to the next.
   */
  hop_s?: number;
  /**
   * The stage of this worker, from 0. Stage 0 receives the prompt, and answers.
   */
  index: number;
  /**
   * Layers of this stage; 0: runs of equal length, if no member says its layers.
   */
  n_layers?: number;
  /**
   * Stages of the group.
   */
  n_stages: number;
}
/**
 * A conductor will not use this worker. The worker logs the reason; a prefill or decode worker
 *     stops when no connected conductor is left that uses it.
 */
export interface Unwelcome {
  /**
   * Why, for programs (`halfmoon_protocol.error_codes`); empty: not said.
   */
  code?: string;
  /**
   * Why, for the worker's log.
   */
  reason: string;
  /**
   * Names the type.
   */
  type: "unwelcome";
}
/**
 * A frame, or a hello, of other protocol versions came; nothing was done about it.
 *
 *     Each such hello is answered; such frames at most once a second on a connection. Frames that were
 *     not read are lost.
 */
export interface WrongVersion {
  /**
   * The first byte of that frame, or the highest version in that hello.
   */
  got: number;
  /**
   * The highest version of the protocol that the worker speaks.
   */
  max_version: number;
  /**
   * The lowest version of the protocol that the worker speaks.
   */
  min_version: number;
  /**
   * Names the type.
   */
  type: "wrong_version";
}
/**
 * Forget this request and free all it holds. Unknown ids are fine.
 *
 *     A prefill worker answers `PrefillStopped`; a decode worker answers nothing.
 */
export interface Cancel {
  /**
   * For decode: a worker that writes the landing is lost and could not be stopped, so the pages are kept aside for a while before another request gets them.
   */
  landing_in_doubt?: boolean;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Names the type.
   */
  type: "cancel";
}
/**
 * Finish what you have, leave, and come back in this role. Only for workers whose record
 *     lists it in `roles`. Nothing is answered: the worker's record says that it is draining, ends,
 *     and is there again with a higher generation and the new role.
 */
export interface ChangeRole {
  /**
   * Why, for the worker's log.
   */
  reason: string;
  /**
   * The role to come back in.
   */
  role: "decode" | "kvstore" | "prefill";
  /**
   * Names the type.
   */
  type: "change_role";
}
/**
 * Set pages aside for the KV of a prompt; answered by `DecodeReserved` or `DecodeRefused`.
 */
export interface ReserveDecode {
  /**
   * Hashes of the prompt's full blocks. Only for a worker whose record says `keeps_pages`, and if all that write to the landing say `skips_held_blocks`; empty: no page of it is shared.
   */
  block_hashes?: Uint8Array[];
  /**
   * Tokens whose KV will land; tokens delivered by an earlier try included.
   */
  n_tokens: number;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  stopping: Stopping;
  /**
   * Parent of the worker's span, which lasts until the last token; none: not traced.
   */
  trace?: TraceContext | null;
  /**
   * Names the type.
   */
  type: "reserve_decode";
}
/**
 * The end of this try: its `max_new_tokens` count from behind these `n_tokens`, the first token included. Tokens that earlier tries delivered are subtracted already.
 */
export interface Stopping {
  /**
   * New tokens at the most, the first one included. In messages it counts those of this try, so a later try has what is left.
   */
  max_new_tokens: number;
  /**
   * New tokens of which none is a stop token, unless nothing else may come; counted as `max_new_tokens`.
   */
  min_new_tokens?: number;
  /**
   * Each of these ends the request; it is reported and counted, its text is not shown.
   */
  stop_token_ids?: number[];
}
/**
 * The span that the receiver's spans are children of (https://www.w3.org/TR/trace-context/).
 *
 *     Only requests that are sampled carry one. Who makes no traces ignores it.
 */
export interface TraceContext {
  /**
   * ``00-<trace id, 32 hex digits>-<span id, 16>-01``
   */
  traceparent: string;
  /**
   * Additions of tracing systems, unchanged.
   */
  tracestate?: string;
}
/**
 * The KV has landed and the first token is known: go on from there.
 */
export interface StartDecode {
  /**
   * Only for a worker whose record says `keeps_answers`; none: no block is kept.
   */
  answer_chain?: AnswerChain | null;
  /**
   * As in `StartPrefill`, beside `kv_transfer_params`.
   */
  cache_salt?: string;
  /**
   * The token that prefill chose; the client has it already.
   */
  first_token: number;
  /**
   * All tokens before `first_token`; empty when sampling does not depend on them, and no server has to fetch their KV.
   */
  history?: number[];
  /**
   * As in `PrefillDone`; empty: the KV is in the landing.
   */
  kv_transfer_params?: string;
  /**
   * Tokens of the client's prompt, behind which the client's output begins. Less than the `n_tokens` of the reservation when earlier tries delivered tokens; no limit counts from here.
   */
  n_prompt: number;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  sampling: Sampling;
  /**
   * For workers of before this protocol had features, whose record has none: the `stopping` of the reservation once more. Others get none: the reservation says it.
   */
  stopping?: Stopping1 | null;
  /**
   * Names the type.
   */
  type: "start_decode";
}
/**
 * Where a chain of block hashes continues behind a prompt, and which kvstore keeps its blocks.
 *
 *     The blocks that decode completes have the prompt's last tokens and the answer's.
 */
export interface AnswerChain {
  parent: Uint8Array;
  store_in: KvstoreAddress;
  /**
   * The prompt's tokens behind its last full block.
   */
  tail?: number[];
  /**
   * As in `StartPrefill`.
   */
  tenant?: string;
}
/**
 * The kvstore that keeps the blocks.
 */
export interface KvstoreAddress {
  /**
   * ZeroMQ endpoint of its ROUTER.
   */
  commands: string;
  /**
   * Its record's: a restarted kvstore is another one.
   */
  generation: number;
  /**
   * `WorkerInfo.key_id` of its record.
   */
  key_id?: string;
  /**
   * Name of a worker, such as `decode-0`.
   */
  worker_id: string;
}
/**
 * How the further tokens are chosen.
 */
export interface Sampling {
  /**
   * Subtracted from a token's logit for each time that it is in the answer.
   */
  frequency_penalty?: number;
  /**
   * What the whole answer must be: a grammar in Lark's syntax with llguidance's additions (``%json`` and a schema). Empty: anything.
   */
  grammar?: string;
  /**
   * Added to the logits of these tokens before all else.
   */
  logit_bias?: [number, number][];
  /**
   * Report each new token's score with so many likeliest tokens; None: no scores.
   */
  logprobs?: number | null;
  /**
   * Tokens are kept that are at least this times as likely as the likeliest; 0 keeps all.
   */
  min_p?: number;
  /**
   * Subtracted from the logits of tokens that are in the answer.
   */
  presence_penalty?: number;
  /**
   * The same for the prompt's tokens. All of them are computed then, none come from a cache.
   */
  prompt_logprobs?: number | null;
  /**
   * Divides positive logits of all tokens so far, and multiplies negative ones; 1: no penalty.
   */
  repetition_penalty?: number;
  seed?: bigint;
  /**
   * Logits are divided by it; 0 is greedy.
   */
  temperature?: number;
  /**
   * So many of the likeliest tokens are kept; 0 keeps all.
   */
  top_k?: number;
  /**
   * The likeliest tokens whose probabilities add up to this are kept; 1 keeps all.
   */
  top_p?: number;
}
/**
 * When a request is finished, as far as token ids tell (stop strings are the gateway's).
 */
export interface Stopping1 {
  /**
   * New tokens at the most, the first one included. In messages it counts those of this try, so a later try has what is left.
   */
  max_new_tokens: number;
  /**
   * New tokens of which none is a stop token, unless nothing else may come; counted as `max_new_tokens`.
   */
  min_new_tokens?: number;
  /**
   * Each of these ends the request; it is reported and counted, its text is not shown.
   */
  stop_token_ids?: number[];
}
/**
 * Pages are set aside until the landing's deadline, or until `Cancel`.
 */
export interface DecodeReserved {
  /**
   * Seconds, from this answer's sending, after which the pages are given to others if decoding has not started.
   */
  expires_s: number;
  landing: Landing;
  /**
   * So many blocks at the landing's beginning have their KV already, and nothing may write to their pages: other requests may read them. At least the last block of the prompt is to land.
   */
  n_held_blocks?: number;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Names the type.
   */
  type: "decode_reserved";
}
/**
 * Where prefill writes the KV.
 */
export interface Landing {
  layout: KvLayout1;
  /**
   * Page i of the request's blocks; its bytes start at ``pages[i] * layout.block_bytes``.
   */
  pages: number[];
  region: Region;
}
/**
 * How the bytes of a page are laid out.
 */
export interface KvLayout1 {
  /**
   * Tokens per block. Prompts are cut into 16 to 512; a receiver refuses others by name.
   */
  block_size: number;
  /**
   * Type of each of these numbers.
   */
  dtype: "bfloat16" | "float16" | "float32";
  /**
   * Numbers in one head's key, and in its value.
   */
  head_dim: number;
  /**
   * Fingerprint of config and weights: KV of another model is noise.
   */
  model: string;
  /**
   * Heads of keys and values in each layer.
   */
  n_kv_heads: number;
  /**
   * Layers whose keys and values a block has.
   */
  n_layers: number;
}
/**
 * The pool, or a part of it that its key opens for this request alone.
 */
export interface Region {
  /**
   * The segment's generation: a restarted process has a higher one, and an access with an old one is refused rather than applied to other memory.
   */
  generation: number;
  key: Uint8Array;
  /**
   * Its length; accesses beyond it are refused.
   */
  length: number;
  /**
   * Name of the segment, the key of its record in the metadata server.
   */
  segment: string;
}
/**
 * No pages, or no such length: nothing is held for this request.
 */
export interface DecodeRefused {
  /**
   * Why, for programs (`halfmoon_protocol.error_codes`); empty: not said.
   */
  code?: string;
  /**
   * Why, for people.
   */
  reason: string;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Seconds after which room is likely, if it is retryable.
   */
  retry_after_s?: number;
  /**
   * True when another try can succeed, here later or at another worker (no free page now, draining); false when none can (too long).
   */
  retryable: boolean;
  /**
   * Names the type.
   */
  type: "decode_refused";
}
/**
 * The tokens of one decode step, of all requests of this conductor in it.
 */
export interface TokensProduced {
  /**
   * One token of each request.
   */
  produced: Produced[];
  /**
   * Scores of the tokens whose requests ask for `logprobs`.
   */
  scores?: [string, TokenScore][];
  /**
   * Rises with each message to a conductor; 0: not numbered.
   */
  step: number;
  /**
   * Names the type.
   */
  type: "tokens_produced";
}
/**
 * This request is gone from the worker and all it held is free.
 */
export interface DecodeFailed {
  /**
   * Why, for programs (`halfmoon_protocol.error_codes`); empty: not said.
   */
  code?: string;
  /**
   * The worker that later tries of this request are to avoid, if there is another one.
   */
  culprit?: string | null;
  /**
   * True when the request itself is at fault, such as by a grammar that takes too long. Then no worker should try it again, the client gets this as its error, and `retryable` is false.
   */
  invalid?: boolean;
  /**
   * Why, for people.
   */
  reason: string;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * True when another try can succeed (preempted, landing lost), false when it can't.
   */
  retryable: boolean;
  /**
   * Names the type.
   */
  type: "decode_failed";
}
/**
 * How busy a decode worker is; published.
 */
export interface DecodeLoad {
  /**
   * Tokens that the next step attends to, over all its requests.
   */
  context_tokens: number;
  /**
   * Pages for further requests, those that kept KV would give up included.
   */
  free_pages: number;
  /**
   * Pages of the pool.
   */
  n_pages: number;
  /**
   * Reservations that are not started yet.
   */
  n_reserved: number;
  /**
   * Requests in the next step.
   */
  n_running: number;
  /**
   * Seconds of a recent step, smoothed; 0 before the first one.
   */
  step_s: number;
  /**
   * Names the type.
   */
  type: "decode_load";
}
/**
 * Compute the KV of these tokens, write it to the landing, choose the next token.
 */
export interface StartPrefill {
  /**
   * Hashes of the full blocks of `token_ids`.
   */
  block_hashes: Uint8Array[];
  /**
   * The salt in `block_hashes`, for a server that hashes the blocks by itself; empty: none.
   */
  cache_salt?: string;
  /**
   * Blocks that may be read instead of computed; none: none are known.
   */
  cached?: CachedPrefix | null;
  /**
   * Seconds from this message's arrival until the first token is due: what is left of the limit of its time to first token; none: there is no limit. A worker may order its queue by it.
   */
  deadline_s?: number | null;
  landing: Landing1;
  /**
   * Seconds from this message's arrival after which nothing may be written to the landing.
   */
  landing_expires_s: number;
  /**
   * So many blocks at the landing's beginning have their KV already: nothing is written to their pages. Only for a worker whose record says `skips_held_blocks`.
   */
  n_held_blocks?: number;
  /**
   * Tokens of the client's prompt: the first so many of `token_ids`. The same in every try; no limit counts from here.
   */
  n_prompt: number;
  /**
   * The largest priority in the queue goes first. The worker decides how others are kept from starving.
   */
  priority?: number;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  sampling: Sampling1;
  /**
   * The stages after this one, in order, when a group is to compute the prompt. Only for a worker whose record says that it is stage 0 of a group; it answers for all stages.
   */
  stages?: StageAddress[];
  stopping: Stopping2;
  /**
   * The kvstore that keeps the blocks for reuse; none when no kvstore is live.
   */
  store_in?: KvstoreAddress2 | null;
  /**
   * The tenant of the request; passed on to the kvstore that keeps the blocks.
   */
  tenant?: string;
  /**
   * Everything before the token to choose; tokens delivered by an earlier try included.
   */
  token_ids: number[];
  /**
   * Parent of the worker's span; none: not traced.
   */
  trace?: TraceContext | null;
  /**
   * Names the type.
   */
  type: "start_prefill";
}
/**
 * The first `n_blocks` blocks of a prompt are at this kvstore, as far as is known.
 */
export interface CachedPrefix {
  kvstore: KvstoreAddress1;
  /**
   * Blocks of the prefix.
   */
  n_blocks: number;
  /**
   * Further kvstores that hold as many, nearest first: read when `kvstore` fails.
   */
  replicas?: KvstoreAddress2[];
}
/**
 * The kvstore to read first.
 */
export interface KvstoreAddress1 {
  /**
   * ZeroMQ endpoint of its ROUTER.
   */
  commands: string;
  /**
   * Its record's: a restarted kvstore is another one.
   */
  generation: number;
  /**
   * `WorkerInfo.key_id` of its record.
   */
  key_id?: string;
  /**
   * Name of a worker, such as `decode-0`.
   */
  worker_id: string;
}
/**
 * A kvstore as a prefill worker reaches it.
 */
export interface KvstoreAddress2 {
  /**
   * ZeroMQ endpoint of its ROUTER.
   */
  commands: string;
  /**
   * Its record's: a restarted kvstore is another one.
   */
  generation: number;
  /**
   * `WorkerInfo.key_id` of its record.
   */
  key_id?: string;
  /**
   * Name of a worker, such as `decode-0`.
   */
  worker_id: string;
}
/**
 * Where the KV is written.
 */
export interface Landing1 {
  layout: KvLayout1;
  /**
   * Page i of the request's blocks; its bytes start at ``pages[i] * layout.block_bytes``.
   */
  pages: number[];
  region: Region;
}
/**
 * How the next token is chosen.
 */
export interface Sampling1 {
  /**
   * Subtracted from a token's logit for each time that it is in the answer.
   */
  frequency_penalty?: number;
  /**
   * What the whole answer must be: a grammar in Lark's syntax with llguidance's additions (``%json`` and a schema). Empty: anything.
   */
  grammar?: string;
  /**
   * Added to the logits of these tokens before all else.
   */
  logit_bias?: [number, number][];
  /**
   * Report each new token's score with so many likeliest tokens; None: no scores.
   */
  logprobs?: number | null;
  /**
   * Tokens are kept that are at least this times as likely as the likeliest; 0 keeps all.
   */
  min_p?: number;
  /**
   * Subtracted from the logits of tokens that are in the answer.
   */
  presence_penalty?: number;
  /**
   * The same for the prompt's tokens. All of them are computed then, none come from a cache.
   */
  prompt_logprobs?: number | null;
  /**
   * Divides positive logits of all tokens so far, and multiplies negative ones; 1: no penalty.
   */
  repetition_penalty?: number;
  seed?: bigint;
  /**
   * Logits are divided by it; 0 is greedy.
   */
  temperature?: number;
  /**
   * So many of the likeliest tokens are kept; 0 keeps all.
   */
  top_k?: number;
  /**
   * The likeliest tokens whose probabilities add up to this are kept; 1 keeps all.
   */
  top_p?: number;
}
/**
 * A prefill worker of a group as the others of the group reach it.
 */
export interface StageAddress {
  /**
   * ZeroMQ endpoint of its ROUTER.
   */
  commands: string;
  /**
   * Its record's: a restarted worker is another one.
   */
  generation: number;
  /**
   * `WorkerInfo.key_id` of its record.
   */
  key_id?: string;
  /**
   * Name of a worker, such as `decode-0`.
   */
  worker_id: string;
}
/**
 * When a request is finished, as far as token ids tell (stop strings are the gateway's).
 */
export interface Stopping2 {
  /**
   * New tokens at the most, the first one included. In messages it counts those of this try, so a later try has what is left.
   */
  max_new_tokens: number;
  /**
   * New tokens of which none is a stop token, unless nothing else may come; counted as `max_new_tokens`.
   */
  min_new_tokens?: number;
  /**
   * Each of these ends the request; it is reported and counted, its text is not shown.
   */
  stop_token_ids?: number[];
}
/**
 * All KV is in the landing, acknowledged, and the first token is chosen.
 */
export interface PrefillDone {
  /**
   * Seconds of forward passes, waits for fetched layers included.
   */
  compute_s: number;
  /**
   * Seconds from the last forward's end until all bytes were acknowledged.
   */
  drain_s: number;
  /**
   * Seconds until the last of them had arrived.
   */
  fetch_s?: number;
  /**
   * Bytes that were fetched from a kvstore.
   */
  fetched_bytes?: number;
  /**
   * The kvstore that they came from; none: the first one named, or nothing was fetched.
   */
  fetched_from?: string | null;
  /**
   * "" when the request continues, else "stop" or "length": then no decode is needed.
   */
  finish: "" | "length" | "stop";
  /**
   * The token that follows `token_ids`.
   */
  first_token: number;
  /**
   * How a decode server fetches the KV from this prefill server, which has no landing to write to. The decode worker gets it in `StartDecode`.
   */
  kv_transfer_params?: string;
  /**
   * Tokens whose KV was fetched, or held, rather than computed; fewer than there are `token_ids`.
   */
  n_cached: number;
  /**
   * Scores of the client's prompt from its second token on, if it asks for `prompt_logprobs`.
   */
  prompt_scores?: TokenScore[];
  /**
   * Seconds from the command's arrival to the first forward.
   */
  queue_s: number;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Score of the first token, if the request asks for `logprobs`.
   */
  score?: TokenScore | null;
  /**
   * Times of all parts, for metrics alone; no decision depends on them.
   */
  times?: PrefillTimes | null;
  /**
   * Names the type.
   */
  type: "prefill_done";
}
/**
 * What a request waited for at its prefill worker, from the command's arrival to the answer,
 *     by the worker's clock: each moment is in one of these, so they add up to the whole.
 */
export interface PrefillTimes {
  /**
   * Forward passes with this request, without those waits.
   */
  compute_s: number;
  /**
   * Waiting for kvstores: for answers, and in forward passes for cached layers under way.
   */
  fetch_s: number;
  /**
   * Waiting for pages, for its first forward, and between its chunks for those of others.
   */
  queue_s: number;
  /**
   * Waiting for the last bytes: from the end of the last forward until all are acknowledged and verified.
   */
  transfer_s: number;
}
/**
 * This request is gone from the worker, and all it held is free.
 *
 *     Nothing more will be written to its landing, unless `landing_in_doubt` is true.
 */
export interface PrefillFailed {
  /**
   * Why, for programs (`halfmoon_protocol.error_codes`); empty: not said.
   */
  code?: string;
  /**
   * The worker that could not be reached, if that was the cause.
   */
  culprit?: string | null;
  /**
   * True when the request itself is at fault, such as by a grammar that takes too long. Then no worker should try it again, the client gets this as its error, and `retryable` is false.
   */
  invalid?: boolean;
  /**
   * True when bytes may still land: the landing's owner did not confirm the end of writes that were given up, or a further stage of the group could not be asked to stop.
   */
  landing_in_doubt?: boolean;
  /**
   * Why, for people.
   */
  reason: string;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * True when another try can succeed.
   */
  retryable: boolean;
  /**
   * Names the type.
   */
  type: "prefill_failed";
}
/**
 * The answer to `Cancel`: nothing more will be written to this request's landing.
 *
 *     So its pages may be given to others, unless `landing_in_doubt` is true.
 */
export interface PrefillStopped {
  /**
   * True when bytes may still land: the landing's owner did not confirm the end of writes that were given up, or a further stage of the group could not be asked to stop.
   */
  landing_in_doubt?: boolean;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Names the type.
   */
  type: "prefill_stopped";
}
/**
 * How busy a prefill worker is; published.
 */
export interface PrefillLoad {
  /**
   * Pages without a holder.
   */
  free_pages: number;
  /**
   * Pages of the pool.
   */
  n_pages: number;
  /**
   * Requests that wait for their first forward.
   */
  n_queued: number;
  /**
   * Tokens still to compute, of running and queued requests.
   */
  queued_tokens: number;
  /**
   * Names the type.
   */
  type: "prefill_load";
}
/**
 * Compute the layers of one stage for a prompt, chunk by chunk, as activations arrive.
 *
 *     Answered by `ShareReady`, and then by `ShareDone` and `ShareKept`, or by `ShareEnded`.
 */
export interface StartShare {
  /**
   * The cached prefix, leased by stage 0: the prompt's first blocks.
   */
  cached?: BlockPlaces | null;
  /**
   * Seconds from this message's arrival until the first token is due; None: at no time.
   */
  deadline_s?: number | null;
  landing: Landing2;
  /**
   * Seconds from this message's arrival after which nothing may be written to the landing.
   */
  landing_expires_s: number;
  layout: KvLayout2;
  /**
   * For the last stage: tokens that the first one must not be, unless nothing else may come.
   */
  masked_token_ids?: number[];
  /**
   * As in `StartPrefill`.
   */
  n_held_blocks?: number;
  /**
   * As in `StartPrefill`.
   */
  n_prompt: number;
  /**
   * Where this stage writes its activations; None at the last stage.
   */
  next_slots?: ActivationSlots | null;
  /**
   * As in `StartPrefill`.
   */
  priority?: number;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Room for new blocks, reserved by stage 0.
   */
  room?: BlockPlaces | null;
  sampling: Sampling2;
  stage: Stage1;
  /**
   * As in `StartPrefill`.
   */
  token_ids: number[];
  /**
   * Parent of the worker's span; none: not traced.
   */
  trace?: TraceContext | null;
  /**
   * Names the type.
   */
  type: "start_share";
}
/**
 * Where blocks of a prompt are, or are to be written, in the memory of a kvstore.
 */
export interface BlockPlaces {
  /**
   * By their number in the prompt.
   */
  blocks: number[];
  /**
   * Where each of them begins, from the region's start.
   */
  offsets: number[];
  region: Region1;
}
/**
 * The kvstore's memory, as its answer to stage 0 names it.
 */
export interface Region1 {
  /**
   * The segment's generation: a restarted process has a higher one, and an access with an old one is refused rather than applied to other memory.
   */
  generation: number;
  key: Uint8Array;
  /**
   * Its length; accesses beyond it are refused.
   */
  length: number;
  /**
   * Name of the segment, the key of its record in the metadata server.
   */
  segment: string;
}
/**
 * As in `StartPrefill`; this stage writes its own layers of each page.
 */
export interface Landing2 {
  layout: KvLayout1;
  /**
   * Page i of the request's blocks; its bytes start at ``pages[i] * layout.block_bytes``.
   */
  pages: number[];
  region: Region;
}
/**
 * The shape and meaning of a KV block. Equal layouts mean interchangeable bytes.
 */
export interface KvLayout2 {
  /**
   * Tokens per block. Prompts are cut into 16 to 512; a receiver refuses others by name.
   */
  block_size: number;
  /**
   * Type of each of these numbers.
   */
  dtype: "bfloat16" | "float16" | "float32";
  /**
   * Numbers in one head's key, and in its value.
   */
  head_dim: number;
  /**
   * Fingerprint of config and weights: KV of another model is noise.
   */
  model: string;
  /**
   * Heads of keys and values in each layer.
   */
  n_kv_heads: number;
  /**
   * Layers whose keys and values a block has.
   */
  n_layers: number;
}
/**
 * Memory of a stage into which the stage before it writes the activations of chunks.
 */
export interface ActivationSlots {
  /**
   * Where each slot begins, from the region's start.
   */
  offsets: number[];
  region: Region2;
  /**
   * Bytes of a slot: one chunk's activations fit.
   */
  slot_bytes: number;
  /**
   * Bytes of one token's activations.
   */
  token_bytes: number;
}
/**
 * The registered memory that the slots are in.
 */
export interface Region2 {
  /**
   * The segment's generation: a restarted process has a higher one, and an access with an old one is refused rather than applied to other memory.
   */
  generation: number;
  key: Uint8Array;
  /**
   * Its length; accesses beyond it are refused.
   */
  length: number;
  /**
   * Name of the segment, the key of its record in the metadata server.
   */
  segment: string;
}
/**
 * For the last stage, which chooses the first token.
 */
export interface Sampling2 {
  /**
   * Subtracted from a token's logit for each time that it is in the answer.
   */
  frequency_penalty?: number;
  /**
   * What the whole answer must be: a grammar in Lark's syntax with llguidance's additions (``%json`` and a schema). Empty: anything.
   */
  grammar?: string;
  /**
   * Added to the logits of these tokens before all else.
   */
  logit_bias?: [number, number][];
  /**
   * Report each new token's score with so many likeliest tokens; None: no scores.
   */
  logprobs?: number | null;
  /**
   * Tokens are kept that are at least this times as likely as the likeliest; 0 keeps all.
   */
  min_p?: number;
  /**
   * Subtracted from the logits of tokens that are in the answer.
   */
  presence_penalty?: number;
  /**
   * The same for the prompt's tokens. All of them are computed then, none come from a cache.
   */
  prompt_logprobs?: number | null;
  /**
   * Divides positive logits of all tokens so far, and multiplies negative ones; 1: no penalty.
   */
  repetition_penalty?: number;
  seed?: bigint;
  /**
   * Logits are divided by it; 0 is greedy.
   */
  temperature?: number;
  /**
   * So many of the likeliest tokens are kept; 0 keeps all.
   */
  top_k?: number;
  /**
   * The likeliest tokens whose probabilities add up to this are kept; 1 keeps all.
   */
  top_p?: number;
}
/**
 * One stage of a group of prefill workers that compute long prompts together.
 *
 *     The layers are cut into `n_stages` runs, the last of which may be longer than others (see
 *     `halfmoon_protocol.stage_layers`). A prompt is cut into chunks, and while one stage computes a
 *     chunk, the stage before it computes the next one.
 */
export interface Stage1 {
  /**
   * Tokens of a chunk at the most.
   */
  chunk_tokens?: number;
  /**
   * The first layer of this stage, from 0. A group works if the runs of all its stages join up.
   */
  first_layer?: number;
  /**
   * Name of the group; it can work when all its stages are there.
   */
  group: string;
  /**
   * Seconds in which a chunk's activations are sent from one stage to the next.
   */
  hop_s?: number;
  /**
   * The stage of this worker, from 0. Stage 0 receives the prompt, and answers.
   */
  index: number;
  /**
   * Layers of this stage; 0: runs of equal length, if no member says its layers.
   */
  n_layers?: number;
  /**
   * Stages of the group.
   */
  n_stages: number;
}
/**
 * Forget a share and free all that it holds; answered by `ShareEnded`. Unknown ids are fine.
 */
export interface StopShare {
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Names the type.
   */
  type: "stop_share";
}
/**
 * The activations of a chunk are in a slot of a stage, written by the stage before it.
 */
export interface ChunkSent {
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * The slot that it is in.
   */
  slot: number;
  /**
   * The stage whose slot it is.
   */
  stage: number;
  /**
   * Position of the chunk's first token.
   */
  start: number;
  /**
   * Position behind the chunk's last token.
   */
  stop: number;
  /**
   * Names the type.
   */
  type: "chunk_sent";
}
/**
 * The chunk in a slot of a stage is computed: the stage before it may write there again.
 */
export interface SlotFreed {
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * The slot that is free.
   */
  slot: number;
  /**
   * The stage whose slot it is.
   */
  stage: number;
  /**
   * Names the type.
   */
  type: "slot_freed";
}
/**
 * A further stage holds pages and slots for its share of a prompt.
 */
export interface ShareReady {
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  slots: ActivationSlots1;
  /**
   * Names the type.
   */
  type: "share_ready";
}
/**
 * Where the stage before this one writes its activations.
 */
export interface ActivationSlots1 {
  /**
   * Where each slot begins, from the region's start.
   */
  offsets: number[];
  region: Region2;
  /**
   * Bytes of a slot: one chunk's activations fit.
   */
  slot_bytes: number;
  /**
   * Bytes of one token's activations.
   */
  token_bytes: number;
}
/**
 * A share is still here; sent every second, so that a lost stage 0 is noticed.
 */
export interface ShareProgress {
  /**
   * Tokens of the prompt whose KV is there, cached ones included.
   */
  n_tokens: number;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Names the type.
   */
  type: "share_progress";
}
/**
 * The KV of the stage's layers is in the landing, acknowledged.
 */
export interface ShareDone {
  /**
   * Seconds of forward passes, waits for fetched layers included.
   */
  compute_s?: number;
  /**
   * The first token, chosen by the last stage; None from the others.
   */
  first_token?: number | null;
  /**
   * Scores of the client's prompt, if it asks for `prompt_logprobs`.
   */
  prompt_scores?: TokenScore[];
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Its score, if the request asks for `logprobs`.
   */
  score?: TokenScore | null;
  /**
   * Names the type.
   */
  type: "share_done";
}
/**
 * The stage writes nothing more for this prompt, and holds nothing more of it.
 */
export interface ShareKept {
  /**
   * Whether its layers of the new blocks are in the kvstore's room, acknowledged.
   */
  is_written?: boolean;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * Names the type.
   */
  type: "share_kept";
}
/**
 * A share is gone by a failure or by `StopShare`, and all it held is free.
 *
 *     This stage writes nothing more to the request's landing, unless `landing_in_doubt` is true.
 */
export interface ShareEnded {
  /**
   * Why, for programs (`halfmoon_protocol.error_codes`); empty: not said.
   */
  code?: string;
  /**
   * The other worker that caused the failure.
   */
  culprit?: string | null;
  /**
   * As in `PrefillFailed`.
   */
  invalid?: boolean;
  /**
   * As in `PrefillFailed`: bytes of this stage may still land.
   */
  landing_in_doubt?: boolean;
  /**
   * Why; empty after `StopShare`.
   */
  reason?: string;
  /**
   * Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.
   */
  request_id: string;
  /**
   * True when another try can succeed.
   */
  retryable?: boolean;
  /**
   * Names the type.
   */
  type: "share_ended";
}
/**
 * Make room for blocks; answered by `BlocksReserved` or `KvstoreRefused`.
 */
export interface ReserveBlocks {
  /**
   * In prefix order: block i+1 is the child of block i.
   */
  hashes: Uint8Array[];
  layout: KvLayout3;
  /**
   * Hash of the block before the first of `hashes`; none for the start of a prompt.
   */
  parent: Uint8Array | null;
  /**
   * The tenant whose quota they count against; empty: none.
   */
  tenant?: string;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * The blocks' tokens, ``len(hashes) * block_size`` of them: part of the KV events.
   */
  token_ids: number[];
  /**
   * Names the type.
   */
  type: "reserve_blocks";
}
/**
 * The shape and meaning of a KV block. Equal layouts mean interchangeable bytes.
 */
export interface KvLayout3 {
  /**
   * Tokens per block. Prompts are cut into 16 to 512; a receiver refuses others by name.
   */
  block_size: number;
  /**
   * Type of each of these numbers.
   */
  dtype: "bfloat16" | "float16" | "float32";
  /**
   * Numbers in one head's key, and in its value.
   */
  head_dim: number;
  /**
   * Fingerprint of config and weights: KV of another model is noise.
   */
  model: string;
  /**
   * Heads of keys and values in each layer.
   */
  n_kv_heads: number;
  /**
   * Layers whose keys and values a block has.
   */
  n_layers: number;
}
/**
 * The bytes are written: these blocks may be served. Answered by `BlocksCommitted`.
 */
export interface CommitBlocks {
  /**
   * xxh3-64 of each written block's bytes, in the order of `BlocksReserved.places`.
   */
  checksums: bigint[];
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "commit_blocks";
}
/**
 * Give the reservation back; nothing is answered.
 */
export interface RevokeBlocks {
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "revoke_blocks";
}
/**
 * Hold the longest prefix of these blocks; answered by `BlocksLeased`.
 */
export interface LeaseBlocks {
  /**
   * In prefix order: block i+1 is the child of block i.
   */
  hashes: Uint8Array[];
  layout: KvLayout4;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Of the request that needs the blocks, if it is sampled.
   */
  trace?: TraceContext | null;
  /**
   * Names the type.
   */
  type: "lease_blocks";
}
/**
 * How the bytes of the blocks are laid out.
 */
export interface KvLayout4 {
  /**
   * Tokens per block. Prompts are cut into 16 to 512; a receiver refuses others by name.
   */
  block_size: number;
  /**
   * Type of each of these numbers.
   */
  dtype: "bfloat16" | "float16" | "float32";
  /**
   * Numbers in one head's key, and in its value.
   */
  head_dim: number;
  /**
   * Fingerprint of config and weights: KV of another model is noise.
   */
  model: string;
  /**
   * Heads of keys and values in each layer.
   */
  n_kv_heads: number;
  /**
   * Layers whose keys and values a block has.
   */
  n_layers: number;
}
/**
 * A long read, or a put that is not committed, is still running.
 *
 *     Answered by `LeaseRenewed`, or by `KvstoreRefused` if there is no such ticket any more.
 */
export interface RenewLease {
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "renew_lease";
}
/**
 * The read is over; nothing is answered.
 */
export interface ReleaseLease {
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "release_lease";
}
/**
 * Please copy these blocks from another kvstore: they are asked for often. Answered by
 *     `BlocksReplicated` or `KvstoreRefused`: the owner of the memory decides.
 *
 *     Only for kvstores whose record says `replicates`.
 */
export interface ReplicateBlocks {
  /**
   * In prefix order: block i+1 is the child of block i.
   */
  hashes: Uint8Array[];
  layout: KvLayout5;
  /**
   * Hash of the block before the first of `hashes`; none for the start of a prompt.
   */
  parent: Uint8Array | null;
  source: KvstoreAddress3;
  /**
   * The tenant of the blocks, if known. Copies count against its quota, and are never refused for it.
   */
  tenant?: string;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * The blocks' tokens, ``len(hashes) * block_size`` of them: part of the KV events. Empty when the sender does not know them: a kvstore that moves its blocks elsewhere.
   */
  token_ids: number[];
  /**
   * Names the type.
   */
  type: "replicate_blocks";
}
/**
 * The shape and meaning of a KV block. Equal layouts mean interchangeable bytes.
 */
export interface KvLayout5 {
  /**
   * Tokens per block. Prompts are cut into 16 to 512; a receiver refuses others by name.
   */
  block_size: number;
  /**
   * Type of each of these numbers.
   */
  dtype: "bfloat16" | "float16" | "float32";
  /**
   * Numbers in one head's key, and in its value.
   */
  head_dim: number;
  /**
   * Fingerprint of config and weights: KV of another model is noise.
   */
  model: string;
  /**
   * Heads of keys and values in each layer.
   */
  n_kv_heads: number;
  /**
   * Layers whose keys and values a block has.
   */
  n_layers: number;
}
/**
 * A kvstore as a prefill worker reaches it.
 */
export interface KvstoreAddress3 {
  /**
   * ZeroMQ endpoint of its ROUTER.
   */
  commands: string;
  /**
   * Its record's: a restarted kvstore is another one.
   */
  generation: number;
  /**
   * `WorkerInfo.key_id` of its record.
   */
  key_id?: string;
  /**
   * Name of a worker, such as `decode-0`.
   */
  worker_id: string;
}
/**
 * These copies have become cold and others hold them too: give up those that no
 *     lease holds. Nothing is answered; KV events say what went.
 *
 *     Only for kvstores whose record says `replicates`.
 */
export interface DropBlocks {
  /**
   * Children before parents.
   */
  hashes: Uint8Array[];
  /**
   * Names the type.
   */
  type: "drop_blocks";
}
/**
 * What was read of these is not what their checksums say: look at them. Nothing is
 *     answered; KV events say what went.
 */
export interface VerifyBlocks {
  /**
   * In any order.
   */
  hashes: Uint8Array[];
  /**
   * Names the type.
   */
  type: "verify_blocks";
}
/**
 * Tell all that is stored; answered by `BlocksSnapshot`, or by several, its pages.
 */
export interface SnapshotBlocks {
  /**
   * Hashes that a page shall have at most; 0: all in one answer, or what fits one. A kvstore may answer in larger pages.
   */
  page?: number;
  /**
   * Repeated in the answer.
   */
  ticket?: string;
  /**
   * Names the type.
   */
  type: "snapshot_blocks";
}
/**
 * Write these. Of the hashes asked for and missing in `places`, those in `not_stored` are
 *     not served: another client is writing them, or there is no room now. The rest is stored.
 */
export interface BlocksReserved {
  /**
   * Seconds, from this answer's sending, after which an uncommitted reservation is discarded.
   */
  expires_s: number;
  /**
   * A client that needs these stored asks again; one that fills a cache may ignore them.
   */
  not_stored?: Uint8Array[];
  /**
   * One for each block to write.
   */
  places: Place[];
  region: Region3;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "blocks_reserved";
}
/**
 * The memory to write to.
 */
export interface Region3 {
  /**
   * The segment's generation: a restarted process has a higher one, and an access with an old one is refused rather than applied to other memory.
   */
  generation: number;
  key: Uint8Array;
  /**
   * Its length; accesses beyond it are refused.
   */
  length: number;
  /**
   * Name of the segment, the key of its record in the metadata server.
   */
  segment: string;
}
/**
 * The blocks are served from now on.
 */
export interface BlocksCommitted {
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "blocks_committed";
}
/**
 * The longest prefix that is here, perhaps empty, held until the lease runs out.
 */
export interface BlocksLeased {
  /**
   * Seconds, from this answer's sending, after which the lease ends, unless it is renewed.
   */
  expires_s: number;
  /**
   * Blocks of `places` that were not in memory when they were requested.
   */
  n_from_disk?: number;
  /**
   * One for each block of the prefix, in its order.
   */
  places: Place[];
  region: Region4;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "blocks_leased";
}
/**
 * The memory to read from.
 */
export interface Region4 {
  /**
   * The segment's generation: a restarted process has a higher one, and an access with an old one is refused rather than applied to other memory.
   */
  generation: number;
  key: Uint8Array;
  /**
   * Its length; accesses beyond it are refused.
   */
  length: number;
  /**
   * Name of the segment, the key of its record in the metadata server.
   */
  segment: string;
}
/**
 * The lease, or the reservation, is held for as long again.
 */
export interface LeaseRenewed {
  /**
   * Seconds from this answer's sending.
   */
  expires_s: number;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "lease_renewed";
}
/**
 * The first `n_blocks` of the blocks asked for are served here from now on; those that
 *     were there before count.
 */
export interface BlocksReplicated {
  /**
   * How many of the blocks are served here.
   */
  n_blocks: number;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "blocks_replicated";
}
/**
 * No; the text says why and what would help.
 */
export interface KvstoreRefused {
  /**
   * Why, for programs (`halfmoon_protocol.error_codes`); empty: not said.
   */
  code?: string;
  /**
   * Why, for people.
   */
  reason: string;
  /**
   * Seconds after which a further try may help; 0: not said.
   */
  retry_after_s?: number;
  /**
   * Names one put or one lease; its client chooses it, unique on its connection.
   */
  ticket: string;
  /**
   * Names the type.
   */
  type: "kvstore_refused";
}
/**
 * All blocks that are served, and the KV event sequence number that this state is after.
 *
 *     Events with a sequence number of at most `sequence` are contained in it.
 */
export interface BlocksSnapshot {
  /**
   * Blocks of memory and disk, in any order.
   */
  hashes: Uint8Array[];
  /**
   * Hashes in the pages after this one; 0: it is the last.
   */
  n_after?: number;
  /**
   * Hashes in the pages before this one.
   */
  n_before?: number;
  /**
   * Bytes of blocks that fit without evicting others.
   */
  room_bytes?: number;
  sequence: bigint;
  /**
   * The ticket of `SnapshotBlocks`.
   */
  ticket?: string;
  /**
   * Names the type.
   */
  type: "blocks_snapshot";
}
/**
 * How full a kvstore is, and how far its KV events are; published.
 */
export interface KvstoreLoad {
  /**
   * Blocks that the memory holds.
   */
  n_blocks: number;
  /**
   * Blocks that the disk holds; 0 without one.
   */
  n_disk_blocks?: number;
  /**
   * Blocks on disk; 0 without one.
   */
  n_disk_stored?: number;
  /**
   * Requested blocks since the start that were in memory.
   */
  n_found_in_memory?: number;
  /**
   * Requested blocks since the start that only the disk had.
   */
  n_found_on_disk?: number;
  /**
   * Stored blocks that are being read.
   */
  n_leased: number;
  /**
   * Requested blocks since the start that were not here.
   */
  n_missing?: number;
  /**
   * Blocks of memory that are being written.
   */
  n_reserved: number;
  /**
   * Blocks in memory that can be read.
   */
  n_stored: number;
  sequence?: bigint;
  /**
   * Names the type.
   */
  type: "kvstore_load";
}
