// Prefixes that are asked for again and again, and who holds them.

import { byId, el, keyed, say } from "./dom.js";
import { count, plural } from "./format.js";

/** `onPoint` is told which workers to mark on the map. */
export class HotPrefixes {
  constructor(onPoint) {
    this.body = byId("prefixes-body");
    this.list = el("ol", { class: "prefixes" });
    this.empty = el("p", { class: "empty" }, "None yet. Ask for the same beginning twice, and it is here with those who hold it.");
    this.body.append(this.empty, this.list);
    this.onPoint = onPoint;
  }

  show({ cluster }) {
    const hot = cluster.hot_prefixes;
    const most = Math.max(...hot.map((prefix) => prefix.uses), 1);
    this.empty.hidden = hot.length > 0;
    keyed(this.list, hot, (prefix) => prefix.prefix, () => this.make(), (element, prefix) => {
      element.holders = prefix.holders;
      say(element.querySelector(".name"), prefix.prefix.slice(0, 10));
      say(element.querySelector(".size"), plural(prefix.n_tokens, "token"));
      say(element.querySelector(".value"), `${prefix.uses >= 10 ? count(prefix.uses) : prefix.uses.toFixed(1)}×`);
      element.querySelector(".fill").style.width = `${(100 * prefix.uses) / most}%`;
      const holders = prefix.holders.length ? prefix.holders : ["no holder"];
      keyed(element.querySelector(".holders"), holders, (h) => h, (h) => el("span", { class: prefix.holders.length ? "chip kvstore" : "note" }, h), () => {});
    });
  }

  make() {
    const item = el("li", { class: "prefix", tabindex: 0 },
      el("span", { class: "name mono" }), el("span", { class: "size note" }),
      el("span", { class: "bar" }, el("span", { class: "fill kvstore" })), el("span", { class: "value" }),
      el("span", { class: "holders" }));
    const point = () => this.onPoint(item.holders);
    const leave = () => this.onPoint([]);
    for (const [name, act] of [["pointerenter", point], ["focus", point], ["pointerleave", leave], ["blur", leave]]) {
      item.addEventListener(name, act);
    }
    return item;
  }
}
