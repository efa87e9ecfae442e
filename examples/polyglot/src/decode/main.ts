/** A decode worker for a Halfmoon cluster: `node dist/decode/main.js --metadata URL --model FOLDER`. */

import { readSettings } from "../settings.js";
import type { KvLayout } from "../wire/messages.js";
import { Worker } from "../worker.js";
import { fingerprint } from "./fingerprint.js";
import { Llama } from "./llama.js";
import { DecodeService } from "./service.js";

const settings = readSettings("decode");
const model = new Llama(settings.model);
const layout: KvLayout = {
  model: fingerprint(settings.model),
  n_layers: model.nLayers,
  n_kv_heads: model.nKvHeads,
  head_dim: model.headDim,
  dtype: "float32",
  block_size: settings.blockSize,
};
const worker = await Worker.open(settings, "decode");
await worker.serve(new DecodeService(worker, model, layout));
