// What the cluster does over time: throughput, requests under way, cache hits, failures; and which
// workers came and went, with what became of their requests.

import { Bars } from "./bars.js";
import { byId, el, keyed, say } from "./dom.js";
import { ago, count, plural } from "./format.js";

const N_EVENTS = 6;

const sum = (samples, name) => samples.reduce((total, sample) => total + sample[name], 0);
const most = (samples, name) => Math.max(...samples.map((sample) => sample[name]));
const total = (values) => values.reduce((a, b) => a + b, 0);

export class Activity {
  constructor() {
    this.throughput = new Bars(byId("throughput"), {
      title: "Tokens per second",
      parts: [{ name: "tokens", kind: "decode" }],
      read: (samples, seconds) => [sum(samples, "n_tokens") / seconds],
      format: (values) => short(total(values)),
      empty: "no tokens yet",
    });
    this.underWay = new Bars(byId("under-way"), {
      title: "Requests under way",
      parts: [{ name: "placed", kind: "prefill" }, { name: "waiting", kind: "queue" }],
      read: (samples) => [most(samples, "running") - most(samples, "waiting"), most(samples, "waiting")],
      format: (values) => short(total(values)),
      empty: "none",
    });
    this.hits = new Bars(byId("hits"), {
      title: "Prompt tokens from the cache",
      parts: [{ name: "share", kind: "kvstore" }],
      read: (samples) => (sum(samples, "prompt_tokens") ? [(100 * sum(samples, "cached_tokens")) / sum(samples, "prompt_tokens")] : null),
      format: (values) => `${Math.round(total(values))} %`,
      empty: "none",
      top: 100,
    });
    this.failures = new Bars(byId("failures"), {
      title: "Failures",
      parts: [{ name: "refused", kind: "warn" }, { name: "failed", kind: "bad" }, { name: "placed again", kind: "chosen" }],
      read: (samples) => [sum(samples, "rejected"), sum(samples, "failed"), sum(samples, "placed_again")],
      format: (values) => short(total(values)),
      empty: "none",
    });
    this.list = el("ul", { class: "events" });
    byId("events").append(this.list);
  }

  show({ activity, activityNow, events, points, pointsNow }, range) {
    const seconds = activity.map((second) => ({ ...second, ago_s: activityNow - second.at_s - 1 }));
    const tokens = points.map((p) => ({ ago_s: pointsNow - p.at_s - 1, n_tokens: (p.ttft?.n ?? 0) + (p.tbt?.n ?? 0) }));
    this.throughput.show(tokens, range);
    this.underWay.show(seconds, range);
    this.hits.show(seconds, range);
    const left = events.filter(({ kind }) => kind === "left");
    this.failures.show(seconds, range, left.map((event) => ({ ago_s: activityNow - event.at_s, text: words(event) })));
    const newest = events.slice(-N_EVENTS).reverse();
    keyed(this.list, newest, (event) => `${event.at_s} ${event.worker_id} ${event.kind}`, row, (element, event) => {
      say(element.querySelector(".note"), ago(activityNow - event.at_s));
    });
  }
}

function row(event) {
  return el("li", { class: event.kind }, el("b", { class: event.role }, event.worker_id), ` ${words(event)} `, el("span", { class: "note" }));
}

function words({ kind, reason, n_placed_again: n }) {
  if (kind === "joined") return "joined";
  return `left${reason ? `: ${reason}` : ""}${n ? `; ${plural(n, "request")} placed again` : ""}`;
}

/** Few digits, for labels. */
function short(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}k`;
  return value === Math.round(value) || value >= 10 ? count(value) : value.toFixed(1);
}
