/** A kvstore for a Halfmoon cluster: `node dist/kvstore/main.js --metadata URL`. */

import { readSettings } from "../settings.js";
import { Worker } from "../worker.js";
import { KvstoreService } from "./service.js";

const worker = await Worker.open(readSettings("kvstore"), "kvstore");
await worker.serve(new KvstoreService(worker));
