// The running configuration: what this conductor schedules with, shown when it is opened.

import { byId, el } from "./dom.js";
import { bytes } from "./format.js";

let shown = "";

export function showConfiguration({ conductor, layout, block_bytes, model, scheduling }) {
  if (!byId("configuration").open) return;
  const rows = [
    ["conductor", conductor.conductor_id],
    ["metadata", conductor.metadata],
    ["model", model],
    ["block", layout ? `${layout.block_size} tokens, ${bytes(block_bytes)}` : null],
    ...Object.entries(scheduling),
  ];
  const told = JSON.stringify(rows);
  if (told === shown) return;
  shown = told;
  byId("configuration-body").replaceChildren(
    el("dl", { class: "settings" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, text(value))))),
  );
}

function text(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "boolean") return value ? "on" : "off";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
