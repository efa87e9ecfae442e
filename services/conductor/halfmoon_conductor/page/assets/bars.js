// Quantities over time as stacked bars: each bar stands for a sixtieth of the time shown.

import { el, svg } from "./dom.js";
import { scale, timeLabels } from "./axes.js";

const HEIGHT = 112;
const PAD = { left: 52, right: 10, top: 10, bottom: 20 };
const N_BARS = 60;

export class Bars {
  /**
   * `parts`: `[{name, kind}]`, from the bottom up. `read(samples, seconds)` returns a value for each
   * part, or null where there is nothing to show. `top`: the least value at the upper edge.
   */
  constructor(figure, { title, parts, read, format, empty, top = 0 }) {
    Object.assign(this, { title, parts, read, format, empty, least: top, bars: [], range: 60, marks: [] });
    this.latest = el("span", { class: "latest" });
    this.canvas = svg("svg", { class: "plot bars", role: "img", height: HEIGHT });
    this.tip = el("div", { class: "tip", hidden: true });
    const legend = parts.length > 1 ? parts.map(({ name, kind }) => el("span", { class: "note" }, el("i", { class: kind }), name)) : [];
    figure.append(
      el("figcaption", {}, el("strong", {}, title), el("span", { class: "legend" }, legend), this.latest),
      el("div", { class: "plot-box" }, this.canvas, this.tip),
    );
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  /** `samples`: `{ago_s, …}`, the oldest first; `marks`: `{ago_s, text}`, drawn as lines. */
  show(samples, range, marks = []) {
    const width_s = range / N_BARS;
    const sorted = Array.from({ length: N_BARS }, () => []);
    for (const sample of samples) {
      const at = N_BARS - 1 - Math.floor(sample.ago_s / width_s);
      if (at >= 0 && at < N_BARS) sorted[at].push(sample);
    }
    this.bars = sorted.map((found) => (found.length ? this.read(found, width_s) : null));
    Object.assign(this, { range, marks: marks.filter(({ ago_s }) => ago_s <= range) });
    this.draw();
  }

  get width() {
    return Math.max(200, this.canvas.parentElement.clientWidth);
  }

  x(ago_s) {
    return PAD.left + (1 - ago_s / this.range) * (this.width - PAD.left - PAD.right);
  }

  draw() {
    const { canvas, width, bars } = this;
    const sums = bars.map((values) => (values ? values.reduce((a, b) => a + b, 0) : 0));
    const highest = Math.max(...sums, 0);
    const [top, step] = scale(Math.max(highest, this.least) || 1);
    const y = (value) => PAD.top + (1 - value / top) * (HEIGHT - PAD.top - PAD.bottom);
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    canvas.setAttribute("width", width);
    const last = bars.findLast((values) => values !== null);
    const told = last ? this.format(last) : "nothing yet";
    canvas.setAttribute("aria-label", `${this.title}: ${last ? `lately ${told}` : told}`);
    this.latest.textContent = last ? told : "";
    canvas.replaceChildren(
      ...this.grid(top, step, y, highest > 0 || this.least > 0),
      ...bars.flatMap((values, at) => (values ? this.stack(values, at, y) : [])),
      ...this.marks.map(({ ago_s, text }) => this.mark(ago_s, text)),
      ...(highest > 0 ? [] : [note(width / 2, HEIGHT / 2 - 4, this.empty, "empty")]),
    );
  }

  grid(top, step, y, withLabels) {
    const lines = [];
    for (let value = 0; value <= top * 1.001; value += 2 * step) {
      lines.push(svg("line", { x1: PAD.left, x2: this.width - PAD.right, y1: y(value), y2: y(value), class: "grid" }));
      if (withLabels) lines.push(note(PAD.left - 6, y(value) + 4, this.format([value], true), "end"));
    }
    const labels = timeLabels(this.range, this.width).map(([back, text, anchor]) => note(this.x(back), HEIGHT - 4, text, anchor));
    return [...lines, ...labels];
  }

  stack(values, at, y) {
    const each = (this.width - PAD.left - PAD.right) / N_BARS;
    let from = 0;
    return values.flatMap((value, i) => {
      const [low, high] = [y(from), y(from + value)];
      from += value;
      if (!(value > 0)) return [];
      return [svg("rect", { x: PAD.left + at * each + 0.5, y: high, width: Math.max(1, each - 1), height: Math.max(1, low - high), class: this.parts[i].kind })];
    });
  }

  mark(ago_s, text) {
    const x = this.x(ago_s);
    return svg("line", { x1: x, x2: x, y1: PAD.top, y2: HEIGHT - PAD.bottom, class: "mark" }, svg("title", {}, text));
  }

  point(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const share = (x - PAD.left) / (this.width - PAD.left - PAD.right);
    const at = Math.floor(share * N_BARS);
    const values = this.bars[at];
    this.tip.hidden = !values;
    if (!values) return;
    const parts = this.parts.map(({ name }, i) => `${name} ${this.format([values[i]])}`);
    const ago = Math.round((1 - (at + 0.5) / N_BARS) * this.range);
    this.tip.replaceChildren(el("strong", {}, this.format(values)), el("span", {}, `${this.parts.length > 1 ? `${parts.join(", ")}; ` : ""}${ago} s ago`));
    this.tip.style.left = `${Math.min(Math.max(0, x - 70), this.width - 160)}px`;
  }
}

function note(x, y, text, classes) {
  return svg("text", { x, y, class: `note ${classes}` }, text);
}
