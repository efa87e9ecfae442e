// The last decisions: what was predicted, what came, and for the one that is open, every
// candidate with the reason why it was not taken.

import { byId, el, keyed, say } from "./dom.js";
import { ago, count, percent, plural, seconds, shortId } from "./format.js";

const SHOWN = 40;
const COLUMNS = ["when", "request", "prompt", "reused", "prefill", "decode", "first token: predicted", "came", "between tokens", "answer"];

/** `onSelect` is told the id of the decision that is open, or null. */
export class Decisions {
  constructor(onSelect) {
    this.onSelect = onSelect;
    /** What was shown last, and while a decision is open, what stays. */
    this.last = [];
    this.held = null;
    this.rows = el("tbody", {});
    this.table = el("table", { class: "decisions" },
      el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))), this.rows);
    this.empty = el("p", { class: "empty" }, "No requests yet: try the ", el("a", { href: "#chat-text" }, "playground"), ".");
    this.none = el("p", { class: "empty", hidden: true }, "None of the kept decisions has this in its request id.");
    byId("decisions-body").append(this.empty, this.none, el("div", { class: "scroll" }, this.table));
  }

  show({ cluster, decisions: all, found, decisionsNow, errors, refusals, selectedId }) {
    const decisions = found ?? all;
    const newest = this.listed(decisions, selectedId);
    this.empty.hidden = newest.length > 0 || found !== null;
    this.none.hidden = newest.length > 0 || found === null;
    this.table.hidden = newest.length === 0;
    const items = newest.flatMap((decision) =>
      keyOf(decision) === selectedId ? [{ decision }, { decision, open: true }] : [{ decision }]);
    keyed(this.rows, items, (item) => `${keyOf(item.decision)}${item.open ? " open" : ""}`,
      (item) => (item.open ? el("tr", { class: "open" }) : this.row(item.decision)),
      (row, item) => (item.open ? explain(row, item.decision, cluster.conductor.trace_url) : fill(row, item.decision, decisionsNow, keyOf(item.decision) === selectedId)));
    const newer = selectedId ? decisions.filter((d) => d.at_s > newest[0]?.at_s).length : 0;
    say(byId("decisions-note"), newer ? `${plural(newer, "newer one")}: close this one to see` : accuracy(errors, refusals));
  }

  /** The newest first. While one is open nobody moves it: newer ones wait until it is closed. */
  listed(decisions, selectedId) {
    if (!selectedId || !this.held) {
      this.held = selectedId ? this.last : null;
      this.last = decisions.slice(-SHOWN).reverse();
    }
    if (!this.held) return this.last;
    const now = new Map(decisions.map((decision) => [keyOf(decision), decision]));
    this.held = this.held.map((decision) => now.get(keyOf(decision)) ?? decision);
    return this.held;
  }

  row(decision) {
    const key = keyOf(decision);
    const toggle = () => this.onSelect(key);
    const cells = COLUMNS.map((name) => el("td", { "data-label": name }));
    // The button is what keyboards and readers use; a click anywhere in the row does the same.
    cells[1].append(el("button", { type: "button", class: "link mono", title: decision.request_id, "aria-expanded": "false" }, shortId(decision.request_id)));
    return el("tr", { class: "decision", onclick: toggle }, cells);
  }
}

export const keyOf = (decision) => `${decision.request_id} ${decision.at_s} ${decision.outcome}`;

function accuracy(errors, refusals) {
  const parts = [];
  if (errors.ttft?.n) parts.push(`first tokens took ${errors.ttft.mean_ratio.toFixed(2)}× the predicted time`);
  if (errors.tbt?.n) parts.push(`steps ${errors.tbt.mean_ratio.toFixed(2)}×`);
  const refused = Object.entries(refusals).map(([why, n]) => `${count(n)} for ${why}`);
  if (refused.length) parts.push(`refused: ${refused.join(", ")}`);
  return parts.join(" · ");
}

function fill(row, decision, now, isOpen) {
  const { placement, course, outcome } = decision;
  const { chosen } = placement;
  row.classList.toggle("selected", isOpen);
  row.classList.toggle("refused", outcome !== "placed" && outcome !== "deferred");
  const [when, request, prompt, reused, prefill, decode, predicted, came, tbt, answer] = row.children;
  request.firstChild.setAttribute("aria-expanded", isOpen);
  say(when, ago(now - decision.at_s));
  say(prompt, course ? count(course.n_tokens) : "–");
  say(reused, course && course.ttft_s !== null ? (course.n_cached ? `${count(course.n_cached)} · ${percent(course.n_cached, course.n_tokens)}` : "0") : "");
  reused.classList.toggle("some", Boolean(course?.n_cached));
  say(prefill, outcome === "placed" ? (chosen.group ?? chosen.worker_id) : "");
  say(decode, outcome === "placed" ? (placement.decode ?? "") : outcome.replace("_", " "));
  predicted.replaceChildren(split(chosen), el("span", {}, seconds(chosen.ttft_s)));
  say(came, course?.ttft_s === null || !course ? "" : seconds(course.ttft_s));
  say(tbt, course?.tbt_s ? seconds(course.tbt_s) : "");
  say(answer, end(decision));
}

function end({ outcome, course }) {
  if (!course) return "";
  if (course.end === "finished") return plural(course.n_new, "token");
  if (course.end) return course.end.replace("_", " ");
  return outcome === "placed" ? "under way" : outcome;
}

/** What a predicted time consists of. */
function split({ queue_s, transfer_s, prefill_s, ttft_s }) {
  const parts = [["queue", queue_s], ["transfer", transfer_s], ["prefill", prefill_s]];
  const bar = el("span", { class: "split", role: "img", "aria-label": parts.map(([name, s]) => `${name} ${seconds(s)}`).join(", "), title: parts.map(([name, s]) => `${name} ${seconds(s)}`).join(" · ") });
  for (const [name, s] of parts) {
    if (!(s > 0)) continue;
    const part = el("span", { class: name });
    part.style.flexGrow = String(s / ttft_s);
    bar.append(part);
  }
  return bar;
}

function explain(row, decision, traceUrl) {
  const { placement, course } = decision;
  const scale = Math.max(...placement.estimates.map((e) => e.ttft_s), course?.ttft_s ?? 0, 1e-6);
  const stages = course && course.ttft_s !== null
    ? el("p", { class: "note" }, `It came in ${seconds(course.ttft_s)}: queued ${seconds(course.queue_s)}, computing ${seconds(course.compute_s)}, last bytes ${seconds(course.drain_s)}` +
        (course.n_cached ? `; ${plural(course.n_cached, "token")} read from ${course.fetched_from ?? "a kvstore"}${course.fetch_s ? ` in ${seconds(course.fetch_s)}` : ""}` : "") + ".")
    : null;
  const rows = placement.estimates.map((estimate) => {
    const bar = split(estimate);
    bar.style.width = `${Math.max(2, (100 * estimate.ttft_s) / scale)}%`;
    const taken = !estimate.why_not;
    return el("tr", { class: taken ? "taken" : null },
      el("th", { scope: "row" }, estimate.group ?? estimate.worker_id),
      el("td", { class: "bars" }, bar),
      el("td", { class: "time" }, seconds(estimate.ttft_s)),
      el("td", {}, estimate.n_blocks ? `${plural(estimate.n_blocks, "block")} from ${estimate.source}` : "nothing cached"),
      el("td", {}, taken && decision.outcome === "placed" ? "chosen" : taken ? "the best" : estimate.why_not));
  });
  const more = placement.n_more
    ? el("p", { class: "note" }, `${plural(placement.n_more, "more candidate")}: none is better than those shown.`)
    : null;
  const inside = el("div", { class: "why" },
    el("p", { class: "reason" }, decision.why || "placed"),
    stages,
    traceUrl && decision.trace_id
      ? el("p", {}, el("a", { href: traceUrl.replaceAll("{trace_id}", decision.trace_id), target: "_blank", rel: "noopener noreferrer" }, "Trace of this request"))
      : null,
    el("table", { class: "candidates" },
      el("thead", { class: "sr" }, el("tr", {}, ["candidate", "estimate", "first token", "prefix", "why not"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows)),
    more,
    el("p", { class: "legend" }, [["queue", "queue"], ["transfer", "transfer"], ["prefill", "prefill"]].map(([kind, name]) => el("span", {}, el("i", { class: kind }), name))),
  );
  const before = row.dataset.told;
  const told = JSON.stringify([decision.why, placement.estimates.length, course]);
  if (before === told) return;
  row.dataset.told = told;
  row.replaceChildren(el("td", { colspan: COLUMNS.length }, inside));
}
