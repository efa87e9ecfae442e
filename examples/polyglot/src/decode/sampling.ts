/** Chooses tokens from logits: the same tokens for the same seed as any worker of the cluster. */

import type { Sampling, TokenScore } from "../wire/messages.js";
import type { Filled } from "../wire/schema.js";

const WORD = 2n ** 64n - 1n;
const LEAST_TEMPERATURE = 1.2e-38;
const LEAST_EXPONENT = -40;
const ROUNDER = 1.5 * 2 ** 23;
const GRAIN = 2 ** -10;
/** 2^f for f in [-0.5, 0.5], the highest power first; each is exact in float32. */
const COEFFICIENTS = [
  0x15bba14 * 2 ** -34,
  0x13cea88 * 2 ** -31,
  0x1c6b752 * 2 ** -29,
  0x1ebf9bc * 2 ** -27,
  0x162e42a * 2 ** -25,
  1,
];

/** The tokens of a sequence up to the one that is chosen, for penalties. */
export interface History {
  tokens: number[];
  nPrompt: number;
}

/** Returns the token at a position of its sequence, none of `masked`. The logits are not changed. */
export function chooseToken(
  logits: Float32Array,
  sampling: Filled<Sampling>,
  position: number,
  history: History,
  masked: number[] = [],
): number {
  const scores = logits.slice();
  for (const [token, bias] of sampling.logit_bias)
    scores[token] = logits[token] + Math.fround(bias);
  penalise(scores, sampling, history);
  const mayNotCome = new Set(masked.filter((token) => token < scores.length));
  if (mayNotCome.size < scores.length) for (const token of mayNotCome) scores[token] = -Infinity;
  const highest = maximum(scores);
  if (sampling.temperature === 0 || sampling.top_k === 1) return scores.indexOf(highest);
  const die = uniformDraw(sampling.seed, position);
  if (!Number.isFinite(highest)) return Math.floor(die * scores.length);
  const left = likelyTokens(scores, sampling, highest);
  return pick(left, die);
}

interface Weighted {
  token: number;
  score: number;
  weight: number;
}

/** Returns what min-p, top-k and top-p leave, by rising token ids. */
function likelyTokens(
  scores: Float32Array,
  sampling: Filled<Sampling>,
  highest: number,
): Weighted[] {
  const temperature = Math.max(sampling.temperature, LEAST_TEMPERATURE);
  const { min_p, top_k, top_p } = sampling;
  const least = min_p > 0 ? Math.fround(highest + temperature * Math.log(min_p)) : -Infinity;
  let left: Weighted[] = [];
  scores.forEach((score, token) => {
    if (score >= least) left.push({ token, score, weight: weightOf(score, highest, temperature) });
  });
  if (top_k > 0 && top_k < left.length) left = likeliestFirst(left).slice(0, top_k);
  if (top_p < 1) {
    const wanted = top_p * left.reduce((sum, { weight }) => sum + weight, 0);
    let before = 0;
    left = likeliestFirst(left).filter(({ weight }, i) => {
      const isLeft = i === 0 || before < wanted;
      before += weight;
      return isLeft;
    });
  }
  return left.sort((one, other) => one.token - other.token);
}

function likeliestFirst(tokens: Weighted[]): Weighted[] {
  return tokens.sort((one, other) => other.score - one.score || one.token - other.token);
}

/** Returns the first token at which the sum of weights passes a share of the whole. */
function pick(tokens: Weighted[], die: number): number {
  const mass = die * tokens.reduce((sum, { weight }) => sum + weight, 0);
  let sum = 0;
  for (const { token, weight } of tokens) {
    sum += weight;
    if (sum > mass) return token;
  }
  return tokens.findLast(({ weight }) => weight > 0)?.token ?? tokens[0].token;
}

const float = new Float32Array(1);
const bits = new Int32Array(float.buffer);

/** Computes exp((score - highest) / temperature), a multiple of 2^-33, with defined bits. */
export function weightOf(score: number, highest: number, temperature: number): number {
  const f32 = Math.fround;
  const scale = f32(Math.LOG2E / temperature);
  const exponent = Math.max(f32(f32(score - highest) * scale), LEAST_EXPONENT);
  const rounded = f32(exponent + ROUNDER);
  float[0] = rounded;
  const shift = bits[0] << 23;
  const fraction = f32(exponent - f32(rounded - ROUNDER));
  let weight = f32(fraction * COEFFICIENTS[0]);
  for (const coefficient of COEFFICIENTS.slice(1, -1)) {
    weight = f32(f32(weight + coefficient) * fraction);
  }
  float[0] = weight + 1;
  bits[0] += shift;
  return f32(f32(float[0] + GRAIN) - GRAIN);
}

/** Returns the number in [0, 1) of a seed and a position: Philox-4x64-10, keyed by both. */
export function uniformDraw(seed: bigint, position: number): number {
  let [a, b, c, d] = [1n, 0n, 0n, 0n];
  let [one, other] = [seed, BigInt(position)];
  for (let round = 0; round < 10; round++) {
    const x = a * 0xd2e7470ee14c6c93n;
    const y = c * 0xca5a826395121157n;
    [a, b, c, d] = [(y >> 64n) ^ b ^ one, y & WORD, (x >> 64n) ^ d ^ other, x & WORD];
    one = (one + 0x9e3779b97f4a7c15n) & WORD;
    other = (other + 0xbb67ae8584caa73bn) & WORD;
  }
  return Number(a >> 11n) * 2 ** -53;
}

/** Makes earlier tokens less likely, or more, in place. */
function penalise(scores: Float32Array, sampling: Filled<Sampling>, history: History): void {
  const { repetition_penalty, presence_penalty, frequency_penalty } = sampling;
  if (repetition_penalty !== 1) {
    const penalty = Math.fround(repetition_penalty);
    for (const token of new Set(history.tokens)) {
      scores[token] = scores[token] > 0 ? scores[token] / penalty : scores[token] * penalty;
    }
  }
  if (presence_penalty === 0 && frequency_penalty === 0) return;
  const counts = new Map<number, number>();
  for (const token of history.tokens.slice(history.nPrompt)) {
    counts.set(token, (counts.get(token) ?? 0) + 1);
  }
  for (const [token, n] of counts) scores[token] -= frequency_penalty * n + presence_penalty;
}

/** Returns a token's log probability by the model itself, its rank, and the likeliest tokens. */
export function scoreOf(logits: Float32Array, token: number, nTop: number): TokenScore {
  const highest = maximum(logits);
  const total = logits.reduce((sum, logit) => sum + Math.exp(logit - highest), 0);
  const logprob = (each: number) => logits[each] - highest - Math.log(total);
  const rank = 1 + logits.reduce((n, logit) => n + Number(logit > logits[token]), 0);
  const top: [number, number][] = [];
  for (let n = 0; n < Math.min(nTop, logits.length); n++) {
    let best = -1;
    logits.forEach((logit, each) => {
      const isTaken = top.some(([taken]) => taken === each);
      if (!isTaken && (best < 0 || logit > logits[best])) best = each;
    });
    top.push([best, logprob(best)]);
  }
  return [logprob(token), rank, top];
}

function maximum(values: Float32Array): number {
  let highest = -Infinity;
  for (const value of values) if (value > highest) highest = value;
  return highest;
}
