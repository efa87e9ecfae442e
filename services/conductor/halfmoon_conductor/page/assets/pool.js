// The pool: how full its tiers are, which store holds which hot prefix, and what is copied now.

import { byId, el, keyed, say } from "./dom.js";
import { bytes, count, percent, plural } from "./format.js";

/** With more stores than this their names stand in a row's second line, and columns are left out. */
const MOST_COLUMNS = 10;
const FIGURES = ["memory", "disk", "copies"];
/** Columns before those of the stores. */
const FIRST = ["prefix", "tokens", "uses"];

/** `onPoint` is told which workers to mark on the map. */
export class Pool {
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.tiers = el("dl", { class: "pool-tiers" });
    this.heads = el("tr");
    this.rows = el("tbody");
    this.table = el("table", { class: "pool-prefixes" },
      el("caption", { class: "sr" }, "Hot prefixes, and the stores that hold them"),
      el("thead", {}, this.heads), this.rows);
    this.empty = el("p", { class: "empty" }, "No hot prefix yet. Ask for the same beginning twice, and it is here with the stores that hold it.");
    this.copies = el("ul", { class: "pool-copies", "aria-label": "Copies under way" });
    byId("pool-body").append(this.tiers, this.empty, this.table, this.copies);
  }

  show({ cluster }) {
    const stores = cluster.workers.filter((w) => w.role === "kvstore" && w.load)
      .sort((a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
    this.showTiers(stores, cluster);
    this.showPrefixes(stores.map((store) => store.worker_id), cluster);
    keyed(this.copies, cluster.copies, (copy) => `${copy.target} ${copy.prefix}`, () => el("li"), (element, copy) =>
      say(element, `${copy.source} → ${copy.target}: ${plural(copy.n_blocks, "block")} up to ${copy.prefix.slice(0, 10)}`));
  }

  showTiers(stores, { block_bytes, hot_prefixes }) {
    const sum = (part) => stores.reduce((total, { load }) => total + part(load), 0);
    const tier = (used, room) => room ? `${bytes(used * block_bytes)} of ${bytes(room * block_bytes)}, ${percent(used, room)}` : "none";
    const held = hot_prefixes.filter((prefix) => prefix.holders.length);
    const n_copies = held.reduce((total, prefix) => total + prefix.holders.length, 0);
    const told = {
      memory: tier(sum((load) => load.memory.n_stored), sum((load) => load.memory.n_blocks)),
      disk: tier(sum((load) => load.disk.n_stored), sum((load) => load.disk.n_blocks)),
      copies: held.length ? `${(n_copies / held.length).toFixed(1)} of each hot prefix` : "–",
    };
    keyed(this.tiers, FIGURES, (name) => name, (name) => el("div", {}, el("dt", {}, name), el("dd")),
      (element, name) => say(element.lastElementChild, told[name]));
  }

  showPrefixes(stores, { hot_prefixes, copies }) {
    this.empty.hidden = hot_prefixes.length > 0;
    this.table.hidden = hot_prefixes.length === 0;
    const columns = stores.length > MOST_COLUMNS ? [] : stores;
    const cells = [...FIRST, ...columns];
    keyed(this.heads, cells, (name) => name, (name) => el("th", { scope: "col", class: FIRST.includes(name) ? `of-${name}` : "store" }, el("span", {}, name)), () => {});
    keyed(this.rows, hot_prefixes, (prefix) => prefix.prefix, () => this.row(), (row, prefix) => {
      row.holders = prefix.holders;
      say(row.querySelector(".name"), prefix.prefix.slice(0, 10));
      say(row.querySelector(".note"), columns.length ? "" : prefix.holders.join(", ") || "no holder");
      say(row.querySelector(".of-tokens"), count(prefix.n_tokens));
      say(row.querySelector(".of-uses"), `${prefix.uses >= 10 ? count(prefix.uses) : prefix.uses.toFixed(1)}×`);
      const coming = copies.filter((copy) => copy.prefix === prefix.prefix).map((copy) => copy.target);
      keyed(row, cells, (cell) => cell, () => el("td", { class: "store" }, el("span", { class: "mark" }), el("span", { class: "sr" })), (cell, store) => {
        if (FIRST.includes(store)) return;
        const state = prefix.holders.includes(store) ? "held" : coming.includes(store) ? "coming" : "";
        cell.dataset.state = state;
        say(cell.querySelector(".sr"), { held: "holds it", coming: "is copied to it" }[state] ?? "no");
      });
    });
  }

  row() {
    const row = el("tr", { class: "prefix", tabindex: 0 },
      el("th", { scope: "row", "data-key": "prefix" }, el("span", { class: "name mono" }), el("span", { class: "note" })),
      el("td", { class: "of-tokens", "data-key": "tokens" }),
      el("td", { class: "of-uses", "data-key": "uses" }));
    const point = () => this.onPoint(row.holders);
    const leave = () => this.onPoint([]);
    for (const [name, act] of [["pointerenter", point], ["focus", point], ["pointerleave", leave], ["blur", leave]]) {
      row.addEventListener(name, act);
    }
    return row;
  }
}
