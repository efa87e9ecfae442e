// The few numbers that one looks at first.

import { byId, el, keyed, say } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";

const RECENT_S = 60;

export function showSummary({ cluster, points, pointsNow, decisions }) {
  const { reuse, requests } = cluster;
  const running = Object.values(requests).reduce((sum, n) => sum + n, 0);
  const waiting = requests.deferred + requests.waiting + requests.landed;
  const recent = points.filter((p) => p.at_s > pointsNow - RECENT_S);
  const tokens = recent.reduce((sum, p) => sum + (p.ttft?.n ?? 0) + (p.tbt?.n ?? 0), 0);
  const refused = decisions.filter((d) => d.outcome.startsWith("refused")).length;
  keyed(byId("summary"), [
    {
      name: "Requests now",
      value: count(running),
      more: waiting ? `${count(waiting)} of them wait` : running ? `${requests.prefilling} in prefill, ${requests.decoding} in decode` : "none under way",
    },
    tile("First token", recent, "ttft", cluster.scheduling.ttft_slo_s),
    tile("Between tokens", recent, "tbt", cluster.scheduling.tbt_slo_s),
    { name: "Tokens", value: `${count(tokens / RECENT_S)} / s`, more: `${count(tokens)} in a minute` },
    {
      name: "Read from cache",
      value: percent(reuse.n_cached, reuse.n_tokens),
      more: reuse.n_tokens
        ? `${count(reuse.n_cached)} of ${plural(reuse.n_tokens, "token")}`
        : "no prompt yet",
    },
    { name: "Refused", value: count(refused), more: decisions.length ? `of the last ${count(decisions.length)}` : "none yet" },
  ], (t) => t.name, make, update);
}

function tile(name, recent, kind, limit) {
  const samples = recent.map((p) => p[kind]).filter(Boolean);
  if (!samples.length) return { name, value: "–", more: "none lately" };
  const worst = Math.max(...samples.map((s) => s.p90_s));
  const n = samples.reduce((sum, s) => sum + s.n, 0);
  const mid = samples.reduce((sum, s) => sum + s.p50_s * s.n, 0) / n;
  const more = `p90 ${seconds(worst)}${limit ? `, limit ${seconds(limit)}` : ""}`;
  return { name, value: seconds(mid), more, over: limit !== null && worst > limit };
}

function make({ name }) {
  return el("div", { class: "tile" }, el("span", { class: "tile-name" }, name), el("span", { class: "tile-value" }), el("span", { class: "note" }));
}

function update(element, { value, more, over }) {
  say(element.querySelector(".tile-value"), value);
  say(element.querySelector(".note"), more);
  element.classList.toggle("over", Boolean(over));
}
