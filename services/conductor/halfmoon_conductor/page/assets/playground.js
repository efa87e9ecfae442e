// A chat that streams, and what became of it: how soon, how fast, how much came from the cache.

import * as api from "./api.js";
import { byId, el, say } from "./dom.js";
import { EXAMPLES, answerTo } from "./examples.js";
import { count, percent, plural, seconds } from "./format.js";

export class Playground {
  /** `onShow` is told the request id whose decision is to be opened. */
  constructor({ onShow, onKeyNeeded, onRun }) {
    Object.assign(this, { onShow, onKeyNeeded, onRun });
    this.log = byId("chat");
    this.text = byId("chat-text");
    this.runs = [];
    /** What was said so far, as the API takes it. */
    this.said = [];
    this.stopper = null;
    byId("examples").append(...EXAMPLES.map(({ name, text }) =>
      el("button", { type: "button", class: "chip", onclick: () => this.offer(text) }, name)));
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.text.value);
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(this.text.value);
      }
    });
    byId("chat-stop").addEventListener("click", () => this.stopper?.abort());
    byId("chat-again").addEventListener("click", () => this.again());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  offer(text) {
    this.clear();
    this.text.value = text;
    this.text.focus();
  }

  showModels(models) {
    const select = byId("chat-model");
    const names = models.map((model) => model.id);
    if (names.join() === [...select.options].map((o) => o.value).join()) return;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    this.buttons();
  }

  clear() {
    this.stopper?.abort();
    this.said = [];
    this.log.replaceChildren();
    this.buttons();
  }

  async send(text) {
    if (!text.trim() || this.stopper || !byId("chat-model").value) return;
    this.said.push({ role: "user", content: text });
    this.text.value = "";
    await this.ask();
  }

  /** The last question once more, without its answer. */
  async again() {
    if (this.stopper) return;
    if (this.said.at(-1)?.role === "assistant") this.said.pop();
    await this.ask();
  }

  async ask() {
    const system = byId("chat-system").value.trim();
    const body = {
      model: byId("chat-model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.said],
      max_tokens: Number(byId("chat-tokens").value) || 64,
      temperature: Number(byId("chat-temperature").value) || 0,
    };
    const question = this.said.at(-1).content;
    const right = this.said.length === 1 ? answerTo(question) : undefined;
    const run = new Run(this.log, question, right, (id) => this.onShow(id));
    this.stopper = new AbortController();
    this.buttons();
    try {
      for await (const event of api.chat(body, this.stopper.signal)) run.take(event);
      run.finish();
    } catch (error) {
      if (error.status === 401) this.onKeyNeeded();
      run.fail(this.stopper.signal.aborted ? null : error);
    }
    this.stopper = null;
    if (run.answer) this.said.push({ role: "assistant", content: run.answer });
    else if (!run.nTokens) this.text.value ||= this.said.pop()?.content ?? "";
    if (run.first) this.remember(run);
    this.buttons();
    this.onRun();
  }

  buttons() {
    const busy = this.stopper !== null;
    byId("chat-send").hidden = busy;
    // Until the models are known nobody could answer.
    byId("chat-send").disabled = !byId("chat-model").value;
    byId("chat-stop").hidden = !busy;
    byId("chat-again").hidden = busy || this.said.length === 0;
    byId("chat-clear").hidden = busy || this.said.length === 0;
    byId("examples").hidden = busy;
  }

  /** A line in the table below, to compare. */
  remember(run) {
    this.runs = [...this.runs, run].slice(-6);
    const cells = (tag, texts) => texts.map((text) => el(tag, tag === "th" ? { scope: "col" } : {}, text));
    byId("runs").replaceChildren(el("table", { class: "runs" },
      el("caption", { class: "sr" }, "Your last questions"),
      el("thead", {}, el("tr", {}, cells("th", ["prompt", "reused", "first token", "between", "tokens / s"]))),
      el("tbody", {}, this.runs.toReversed().map((r) => el("tr", {}, cells("td", [
        r.usage ? count(r.usage.prompt_tokens) : "–",
        r.usage ? percent(r.cached, r.usage.prompt_tokens) : "–",
        seconds(r.ttft), seconds(r.tbt), r.rate ? r.rate.toFixed(1) : "–",
      ]))))));
  }

  /** Decisions tell where the reused part came from. */
  showDecisions(decisions) {
    for (const run of this.runs) run.showDecision(decisions.findLast((d) => d.request_id.split("~")[0] === run.id && d.outcome === "placed"));
  }
}

/** One question and its answer, timed here in the browser. */
class Run {
  constructor(log, question, right, onShow) {
    this.right = right;
    this.answer = "";
    this.id = "";
    this.nTokens = 0;
    this.usage = null;
    this.began = performance.now();
    this.first = this.last = 0;
    this.onShow = onShow;
    this.reply = el("div", { class: "said assistant", "aria-live": "polite", "aria-busy": "true" });
    this.meta = el("div", { class: "meta" }, "waiting for the first token …");
    log.append(el("div", { class: "said user" }, question), this.reply, this.meta);
    this.log = log;
    this.scroll();
  }

  get ttft() {
    return this.first ? (this.first - this.began) / 1000 : null;
  }

  get tbt() {
    return this.nTokens > 1 && this.last > this.first ? (this.last - this.first) / 1000 / (this.nTokens - 1) : null;
  }

  get rate() {
    return this.tbt ? 1 / this.tbt : null;
  }

  get cached() {
    return this.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  }

  take(event) {
    this.id = event.id;
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const text = choice.delta?.content ?? "";
    // Token ids are asked for since a token may have no text of its own: half a character.
    const n = choice.token_ids?.length ?? (text ? 1 : 0);
    if (n) {
      this.last = performance.now();
      this.first ||= this.last;
      this.nTokens += n;
    } else if (!text) {
      return;
    }
    this.answer += text;
    say(this.reply, this.answer);
    say(this.meta, this.speed());
    this.scroll();
  }

  speed() {
    const parts = [`first token ${seconds(this.ttft)}`];
    if (this.tbt !== null) parts.push(`${seconds(this.tbt)} between tokens`, `${this.rate.toFixed(1)} tokens / s`);
    return parts.join(" · ");
  }

  finish() {
    this.reply.setAttribute("aria-busy", "false");
    if (!this.answer) this.reply.append(el("span", { class: "note" }, "(an empty answer)"));
    const whole = this.usage?.prompt_tokens ?? 0;
    this.where = el("span", { class: "where" });
    const isRight = this.right && this.answer.includes(this.right);
    const bar = el("div", { class: "reuse", role: "img", "aria-label": `${percent(this.cached, whole)} of the prompt reused` },
      el("span", { class: "cached" }), el("span", { class: "computed" }));
    bar.firstChild.style.flexGrow = String(this.cached);
    bar.lastChild.style.flexGrow = String(Math.max(0, whole - this.cached));
    this.meta.replaceChildren(...[
      this.right ? el("p", { class: isRight ? "right" : "wrong" }, isRight ? "✓ as the list says" : `✗ the list says ${this.right}`) : null,
      bar,
      el("p", { class: "reused" }, el("strong", {}, `Reused ${count(this.cached)} of ${plural(whole, "token")} (${percent(this.cached, whole)})`), this.where),
      el("p", {}, `${this.speed()} · `, el("button", { type: "button", class: "link", onclick: () => this.onShow(this.id) }, "why there?")),
    ].filter(Boolean));
    this.scroll();
  }

  fail(error) {
    this.reply.setAttribute("aria-busy", "false");
    if (error === null) {
      say(this.meta, `stopped${this.first ? ` · ${this.speed()}` : ""}`);
      return;
    }
    const again = error.retryAfter ? ` Try again in ${plural(Number(error.retryAfter), "second")}.` : "";
    const isOurs = !(error instanceof api.Refused) && !(error instanceof TypeError);
    if (isOurs) console.error(error);
    const what = error instanceof api.Refused ? error.message : "The conductor does not answer.";
    this.meta.classList.add("error");
    say(this.meta, what + again);
  }

  showDecision(decision) {
    if (!decision || !this.where || this.where.textContent) return;
    const { chosen, decode } = decision.placement;
    const source = decision.course?.fetched_from ?? chosen.source;
    const from = this.cached && source ? ` from ${source}` : "";
    say(this.where, `${from} at ${chosen.worker_id}, answered by ${decode}`);
    this.scroll();
  }

  scroll() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}
