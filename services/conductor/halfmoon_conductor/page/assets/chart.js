// A quantity over time: the median as a line, the 90th percentile above it, a limit if there is one.

import { scale, timeLabels } from "./axes.js";
import { el, svg } from "./dom.js";
import { plural, seconds } from "./format.js";

const HEIGHT = 168;
const PAD = { left: 52, right: 10, top: 12, bottom: 22 };
/** Seconds without a sample over which a line goes on: a slow stream has one every few. */
const GAP_S = 4;

export class Chart {
  constructor(figure, { title, what, kind }) {
    this.figure = figure;
    this.kind = kind;
    this.title = title;
    this.points = [];
    this.range = 300;
    this.now = 0;
    this.limit = null;
    this.latest = el("span", { class: "latest" });
    this.canvas = svg("svg", { class: `plot ${kind}`, role: "img", height: HEIGHT });
    this.tip = el("div", { class: "tip", hidden: true });
    figure.append(
      el("figcaption", {}, el("strong", {}, title), el("span", { class: "note" }, what), this.latest),
      el("div", { class: "plot-box" }, this.canvas, this.tip),
    );
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.unpoint());
  }

  /** `points`: `{at_s, n, p50_s, p90_s}`, the oldest first. */
  show(points, now, limit, range) {
    Object.assign(this, { points: points.filter((p) => p.at_s >= now - range - 2), now, limit, range });
    this.draw();
  }

  get width() {
    return Math.max(200, this.canvas.parentElement.clientWidth);
  }

  x(at_s) {
    return PAD.left + (1 - (this.now - at_s) / this.range) * (this.width - PAD.left - PAD.right);
  }

  y(value) {
    return PAD.top + (1 - value / this.top) * (HEIGHT - PAD.top - PAD.bottom);
  }

  draw() {
    const { points, canvas, width } = this;
    const highest = Math.max(0, ...points.map((p) => p.p90_s));
    const limitFits = this.limit !== null && (highest === 0 || this.limit <= 4 * highest);
    const [top, step] = scale(Math.max(highest, limitFits ? this.limit : 0) || 1);
    this.top = top;
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    canvas.setAttribute("width", width);
    canvas.setAttribute("aria-label", this.inWords());
    this.cursor = svg("g", { class: "cursor" });
    const parts = [...this.grid(step, highest > 0 || limitFits)];
    if (points.length) parts.push(...this.lines());
    else parts.push(this.note(width / 2, HEIGHT / 2 - 6, "no tokens yet: try the playground", "empty"));
    if (this.limit !== null) parts.push(...this.limitLine(limitFits));
    canvas.replaceChildren(...parts, this.cursor);
    const last = points.at(-1);
    this.latest.textContent = last ? `${seconds(last.p50_s)} · ${seconds(last.p90_s)}` : "";
  }

  inWords() {
    const last = this.points.at(-1);
    if (!last) return `${this.title}: nothing yet`;
    return `${this.title}: lately half of them within ${seconds(last.p50_s)}, nine of ten within ${seconds(last.p90_s)}`;
  }

  *grid(step, withLabels) {
    for (let value = 0; value <= this.top * 1.001; value += step) {
      const y = this.y(value);
      yield svg("line", { x1: PAD.left, x2: this.width - PAD.right, y1: y, y2: y, class: "grid" });
      if (withLabels) yield this.note(PAD.left - 6, y + 4, seconds(round(value)), "end");
    }
    for (const [back, text, anchor] of timeLabels(this.range, this.width)) {
      yield this.note(this.x(this.now - back), HEIGHT - 5, text, anchor);
    }
  }

  *lines() {
    for (const run of runs(this.points)) {
      const p90 = run.map((p) => `${this.x(p.at_s + 0.5)},${this.y(p.p90_s)}`);
      const p50 = run.map((p) => `${this.x(p.at_s + 0.5)},${this.y(p.p50_s)}`);
      if (run.length > 1) {
        yield svg("polygon", { points: [...p90, ...p50.toReversed()].join(" "), class: "between" });
        yield svg("polyline", { points: p90.join(" "), class: "p90" });
        yield svg("polyline", { points: p50.join(" "), class: "p50" });
      }
      if (run.length < 3) {
        for (const p of run) {
          const x = this.x(p.at_s + 0.5);
          yield svg("line", { x1: x, x2: x, y1: this.y(p.p50_s), y2: this.y(p.p90_s), class: "p90" });
          yield svg("circle", { cx: x, cy: this.y(p.p90_s), r: 2, class: "dot-p90" });
          yield svg("circle", { cx: x, cy: this.y(p.p50_s), r: 2.6, class: "dot" });
        }
      }
    }
  }

  *limitLine(fits) {
    const y = fits ? this.y(this.limit) : PAD.top;
    const text = fits ? `limit ${seconds(this.limit)}` : `limit ${seconds(this.limit)}, far above ↑`;
    if (fits) yield svg("line", { x1: PAD.left, x2: this.width - PAD.right, y1: y, y2: y, class: "limit" });
    yield this.note(this.width - PAD.right, fits ? y - 4 : y + 4, text, "end limit-text");
  }

  note(x, y, text, classes) {
    return svg("text", { x, y, class: `note ${classes}` }, text);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const near = this.points.reduce(
      (best, p) => (Math.abs(this.x(p.at_s + 0.5) - x) < Math.abs(this.x(best.at_s + 0.5) - x) ? p : best),
      this.points[0],
    );
    if (!near || Math.abs(this.x(near.at_s + 0.5) - x) > 24) return this.unpoint();
    const at = this.x(near.at_s + 0.5);
    this.cursor.replaceChildren(
      svg("line", { x1: at, x2: at, y1: PAD.top, y2: HEIGHT - PAD.bottom }),
      svg("circle", { cx: at, cy: this.y(near.p50_s), r: 3.5 }),
      svg("circle", { cx: at, cy: this.y(near.p90_s), r: 3.5 }),
    );
    this.tip.replaceChildren(
      el("strong", {}, `${seconds(near.p50_s)} · ${seconds(near.p90_s)}`),
      el("span", {}, `p50 · p90 of ${plural(near.n, "sample")}, ${Math.round(this.now - near.at_s)} s ago`),
    );
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(Math.max(0, at - 70), this.width - 160)}px`;
  }

  unpoint() {
    this.tip.hidden = true;
    this.cursor.replaceChildren();
  }
}

const round = (value) => Number(value.toPrecision(6));

/** Stretches without a gap. */
function runs(points) {
  const found = [];
  for (const p of points) {
    const last = found.at(-1);
    if (last && p.at_s - last.at(-1).at_s <= GAP_S) last.push(p);
    else found.push([p]);
  }
  return found;
}
