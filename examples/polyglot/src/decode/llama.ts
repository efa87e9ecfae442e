/** Computes one token of a Llama model over pages of KV, in float32. */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { readTensors } from "./safetensors.js";

interface Config {
  model_type: string;
  hidden_size: number;
  num_hidden_layers: number;
  num_attention_heads: number;
  num_key_value_heads: number;
  head_dim?: number;
  rms_norm_eps: number;
  vocab_size: number;
  max_position_embeddings: number;
  tie_word_embeddings: boolean;
  rope_parameters: { rope_type: string; rope_theta: number };
}

interface Layer {
  attentionNorm: Float32Array;
  q: Float32Array;
  k: Float32Array;
  v: Float32Array;
  o: Float32Array;
  mlpNorm: Float32Array;
  gate: Float32Array;
  up: Float32Array;
  down: Float32Array;
}

export class Llama {
  readonly nLayers: number;
  readonly nKvHeads: number;
  readonly headDim: number;
  readonly nVocabulary: number;
  readonly maxContext: number;
  private readonly nHeads: number;
  private readonly epsilon: number;
  private readonly layers: Layer[];
  private readonly embedding: Float32Array;
  private readonly norm: Float32Array;
  private readonly head: Float32Array;
  private readonly frequencies: Float32Array;

  constructor(folder: string) {
    const config: Config = JSON.parse(readFileSync(join(folder, "config.json"), "utf8"));
    const { rope_type, rope_theta } = config.rope_parameters;
    if (config.model_type !== "llama" || rope_type !== "default") {
      throw new Error(`${config.model_type} with rope ${rope_type} can't be computed here`);
    }
    this.nLayers = config.num_hidden_layers;
    this.nHeads = config.num_attention_heads;
    this.nKvHeads = config.num_key_value_heads;
    this.headDim = config.head_dim ?? config.hidden_size / this.nHeads;
    this.nVocabulary = config.vocab_size;
    this.maxContext = config.max_position_embeddings;
    this.epsilon = config.rms_norm_eps;
    const tensors = readTensors(folder);
    const tensor = (name: string): Float32Array => {
      const found = tensors.get(name);
      if (!found) throw new Error(`the model has no tensor ${name}`);
      return found;
    };
    this.embedding = tensor("model.embed_tokens.weight");
    this.norm = tensor("model.norm.weight");
    this.head = config.tie_word_embeddings ? this.embedding : tensor("lm_head.weight");
    this.layers = Array.from({ length: this.nLayers }, (_, i) => {
      const of = (name: string) => tensor(`model.layers.${i}.${name}.weight`);
      return {
        attentionNorm: of("input_layernorm"),
        q: of("self_attn.q_proj"),
        k: of("self_attn.k_proj"),
        v: of("self_attn.v_proj"),
        o: of("self_attn.o_proj"),
        mlpNorm: of("post_attention_layernorm"),
        gate: of("mlp.gate_proj"),
        up: of("mlp.up_proj"),
        down: of("mlp.down_proj"),
      };
    });
    this.frequencies = Float32Array.from({ length: this.headDim / 2 }, (_, i) => {
      return 1 / rope_theta ** ((2 * i) / this.headDim);
    });
  }

  /** Runs a token at its position, writes its KV, and returns the logits of the next token. */
  forward(token: number, position: number, kv: PagedKv, pages: number[]): Float32Array {
    const width = this.norm.length;
    const x = this.embedding.slice(token * width, (token + 1) * width);
    this.layers.forEach((layer, i) => {
      const normed = this.rmsNorm(x, layer.attentionNorm);
      const q = this.rotate(product(layer.q, normed), position);
      kv.write(
        i,
        position,
        pages,
        this.rotate(product(layer.k, normed), position),
        product(layer.v, normed),
      );
      add(x, product(layer.o, this.attend(i, q, position, kv, pages)));
      const inner = this.rmsNorm(x, layer.mlpNorm);
      const gate = product(layer.gate, inner);
      const up = product(layer.up, inner);
      for (let j = 0; j < up.length; j++) up[j] *= gate[j] / (1 + Math.exp(-gate[j]));
      add(x, product(layer.down, up));
    });
    return product(this.head, this.rmsNorm(x, this.norm));
  }

  /** Attends from one token to all tokens up to its position. */
  private attend(
    layer: number,
    q: Float32Array,
    position: number,
    kv: PagedKv,
    pages: number[],
  ): Float32Array {
    const { headDim, nHeads, nKvHeads } = this;
    const out = new Float32Array(nHeads * headDim);
    const weights = new Float32Array(position + 1);
    for (let head = 0; head < nHeads; head++) {
      const kvHead = Math.floor((head * nKvHeads) / nHeads);
      const query = head * headDim;
      let largest = -Infinity;
      for (let t = 0; t <= position; t++) {
        const at = kv.offset(layer, 0, t, pages) + kvHead * headDim;
        let dot = 0;
        for (let d = 0; d < headDim; d++) dot += q[query + d] * kv.floats[at + d];
        weights[t] = dot / Math.sqrt(headDim);
        largest = Math.max(largest, weights[t]);
      }
      let total = 0;
      for (let t = 0; t <= position; t++) {
        weights[t] = Math.exp(weights[t] - largest);
        total += weights[t];
      }
      for (let t = 0; t <= position; t++) {
        const at = kv.offset(layer, 1, t, pages) + kvHead * headDim;
        const weight = weights[t] / total;
        for (let d = 0; d < headDim; d++) out[query + d] += weight * kv.floats[at + d];
      }
    }
    return out;
  }

  /** Applies the rotary embedding to all heads, in place. Angles are float32, as in torch. */
  private rotate(heads: Float32Array, position: number): Float32Array {
    const half = this.headDim / 2;
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(position * this.frequencies[i]);
      const [cos, sin] = [Math.fround(Math.cos(angle)), Math.fround(Math.sin(angle))];
      for (let at = i; at < heads.length; at += this.headDim) {
        const [one, other] = [heads[at], heads[at + half]];
        heads[at] = one * cos - other * sin;
        heads[at + half] = other * cos + one * sin;
      }
    }
    return heads;
  }

  private rmsNorm(x: Float32Array, weight: Float32Array): Float32Array {
    let squares = 0;
    for (const value of x) squares += value * value;
    const scale = 1 / Math.sqrt(squares / x.length + this.epsilon);
    return x.map((value, i) => Math.fround(value * scale) * weight[i]);
  }
}

/** The KV of all sequences, in the layout of the protocol. */
export class PagedKv {
  readonly pageFloats: number;
  private readonly rowFloats: number;

  constructor(
    readonly floats: Float32Array,
    model: { nLayers: number; nKvHeads: number; headDim: number },
    private readonly blockSize: number,
  ) {
    this.rowFloats = model.nKvHeads * model.headDim;
    this.pageFloats = model.nLayers * 2 * blockSize * this.rowFloats;
  }

  /** Returns where the keys (side 0) or values (side 1) of a token begin. */
  offset(layer: number, side: 0 | 1, token: number, pages: number[]): number {
    const page = pages[Math.floor(token / this.blockSize)];
    const row = (layer * 2 + side) * this.blockSize + (token % this.blockSize);
    return page * this.pageFloats + row * this.rowFloats;
  }

  write(layer: number, token: number, pages: number[], keys: Float32Array, values: Float32Array) {
    this.floats.set(keys, this.offset(layer, 0, token, pages));
    this.floats.set(values, this.offset(layer, 1, token, pages));
  }
}

/** Returns the product of a matrix, by rows, and a vector. */
function product(matrix: Float32Array, vector: Float32Array): Float32Array {
  const width = vector.length;
  const out = new Float32Array(matrix.length / width);
  for (let row = 0, at = 0; row < out.length; row++) {
    let sum = 0;
    for (let i = 0; i < width; i++) sum += matrix[at++] * vector[i];
    out[row] = sum;
  }
  return out;
}

function add(x: Float32Array, more: Float32Array): void {
  for (let i = 0; i < x.length; i++) x[i] += more[i];
}
