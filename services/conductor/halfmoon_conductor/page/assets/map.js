// The cluster as a picture: the conductor above, then kvstores, prefill and decode from left to
// right, as KV flows. Lines are requests under way, or the one that is selected.

import { byId, el, keyed, say, svg } from "./dom.js";
import { ago, bytes, count, percent, plural, seconds } from "./format.js";
import { fillRoleLine, roleLine } from "./roles.js";

const ROLES = [
  ["kvstore", "KV stores"],
  ["prefill", "Prefill"],
  ["decode", "Decode"],
];
/** Seconds for which a request's way stays visible, however fast it was. */
const SHOWN_S = 4;
/** Seconds of silence after which a worker is marked. */
const SILENT_S = 5;
/** More workers than this of one role are drawn smaller. */
const MANY = 8;

export class ClusterMap {
  /** `onSetRole(worker, role)` pins a worker to a role, or releases it with "auto". */
  constructor(onSetRole) {
    this.onSetRole = onSetRole;
    this.body = byId("map-body");
    this.conductor = el("div", { class: "conductor" });
    this.columns = Object.fromEntries(
      ROLES.map(([role, title]) => [role, column(role, title)]),
    );
    this.lines = svg("svg", { class: "lines", "aria-hidden": "true" });
    this.grid = el("div", { class: "columns" }, ROLES.map(([role]) => this.columns[role].element));
    this.body.append(this.lines, this.conductor, this.grid);
    this.ways = [];
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  show(state) {
    const { cluster } = state;
    this.showConductor(cluster);
    for (const [role] of ROLES) this.showColumn(role, state);
    const live = cluster.workers.filter((w) => !w.refused).length;
    const gone = cluster.gone.length ? `, ${cluster.gone.length} gone` : "";
    const away = cluster.unreachable?.length ? `, ${cluster.unreachable.length} unreachable` : "";
    say(byId("map-note"), `${plural(live, "worker")}${away}${gone} · placement ${cluster.scheduling.placement} · admission ${cluster.scheduling.admission}`);
    this.ways = ways(state);
    this.draw();
  }

  showConductor(cluster) {
    const phases = Object.entries(cluster.requests).filter(([, n]) => n > 0);
    const { conductor_id, metadata } = cluster.conductor;
    this.conductor.replaceChildren(
      el("span", { class: "name" }, conductor_id),
      el("span", { class: "note" }, `metadata: ${metadata}`),
      el("span", { class: "phases" },
        phases.length
          ? phases.map(([phase, n]) => el("span", { class: `phase ${phase}` }, el("b", {}, count(n)), ` ${phase}`))
          : el("span", { class: "note" }, "no request under way")),
    );
  }

  showColumn(role, { cluster, roles, selected, holders }) {
    const { list, head, load } = this.columns[role];
    const here = cluster.workers.filter((w) => w.role === role);
    const gone = cluster.gone.filter((w) => w.role === role).map((w) => ({ ...w, isGone: true }));
    const away = (cluster.unreachable ?? []).filter((w) => w.role === role).map((w) => ({ ...w, isAway: true }));
    list.classList.toggle("many", here.length + gone.length + away.length > MANY);
    say(head, here.length ? `${here.length}` : "none");
    say(load, poolLoad(role, cluster));
    const ofSelected = new Set(selected ? workersOf(selected) : []);
    const all = [...here, ...gone, ...away].sort((a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
    const rows = new Map((roles?.workers ?? []).map((row) => [row.worker_id, row]));
    const make = (worker) => card(worker, this.onSetRole);
    const fill = (element, worker) => {
      fillCard(element, worker, cluster);
      fillRoleLine(element.querySelector(".role-line"), worker.refused || worker.isAway ? null : rows.get(worker.worker_id));
      element.classList.toggle("selected", ofSelected.has(worker.worker_id));
      element.classList.toggle("holds", holders.has(worker.worker_id));
    };
    keyed(list, role === "prefill" ? framed(all) : all, keyOf, (item) => (item.members ? groupFrame() : make(item)), (element, item) => {
      if (!item.members) return fill(element, item);
      fillGroupFrame(element, item);
      keyed(element.querySelector(".stages"), item.members, keyOf, make, fill);
    });
  }

  /** Lines from card to card, where they lie side by side. */
  draw() {
    const frame = this.body.getBoundingClientRect();
    this.lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    this.lines.setAttribute("width", frame.width);
    this.lines.setAttribute("height", frame.height);
    if (getComputedStyle(this.lines).display === "none") return;
    const box = (id) => {
      const found = this.body.querySelector(`[data-key="${CSS.escape(id)}"]`)?.getBoundingClientRect();
      return found && { left: found.left - frame.left, right: found.right - frame.left, y: found.top - frame.top + found.height / 2 };
    };
    const paths = [svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z" })))];
    const top = this.conductor.getBoundingClientRect();
    for (const [role] of ROLES) {
      const head = this.columns[role].element.getBoundingClientRect();
      const from = [top.left + top.width / 2 - frame.left, top.bottom - frame.top];
      const to = [head.left + head.width / 2 - frame.left, head.top - frame.top];
      paths.push(svg("path", { d: bend(from, to, true), class: "command" }));
    }
    for (const { from, to, kind, of, n } of this.ways) {
      const [a, b] = [box(from), box(to)];
      if (!a || !b) continue;
      const path = svg("path", { d: bend([a.right, a.y], [b.left, b.y], false), class: `way ${kind} ${of}`, "marker-end": kind === "chosen" ? "url(#arrow)" : null });
      path.style.strokeWidth = `${Math.min(3.5, 1.2 + 0.4 * n)}px`;
      paths.push(path);
    }
    this.lines.replaceChildren(...paths);
  }
}

/** The workers that a decision sent its request to. */
export function workersOf({ placement }) {
  const { chosen, decode } = placement;
  return [chosen.n_blocks ? chosen.source : null, ...(chosen.members ?? [chosen.worker_id]), decode].filter(Boolean);
}

/** KV on its way: from a kvstore to a prefill worker, from there to a decode worker. */
function ways({ decisions, decisionsNow, selected }) {
  const found = new Map();
  const add = (from, to, kind, of) => {
    const way = `${from} ${to} ${kind}`;
    found.set(way, { from, to, kind, of, n: (found.get(way)?.n ?? 0) + 1 });
  };
  const follow = (decision, kind) => {
    const { chosen, decode } = decision.placement;
    if (decision.outcome !== "placed") return;
    for (const member of chosen.members ?? [chosen.worker_id]) {
      if (chosen.n_blocks && chosen.source !== member) add(chosen.source, member, kind, "read");
      if (decode && decode !== member) add(member, decode, kind, "written");
    }
  };
  for (const decision of decisions) {
    const underWay = decision.course !== null && !decision.course.end;
    if (underWay || decisionsNow - decision.at_s < SHOWN_S) follow(decision, "running");
  }
  if (selected) follow(selected, "chosen");
  return [...found.values()];
}

function bend([x1, y1], [x2, y2], down) {
  const [dx, dy] = down ? [0, (y2 - y1) / 2] : [Math.max(16, (x2 - x1) / 2), 0];
  return `M${x1} ${y1}C${x1 + dx} ${y1 + dy} ${x2 - dx} ${y2 - dy} ${x2} ${y2}`;
}

/** How busy a pool is: its workers' mean predicted time, against the limit if there is one. */
function poolLoad(role, { pools, reuse, scheduling }) {
  if (role === "kvstore") return reuse.n_transferred ? `${plural(reuse.n_transferred, "token")} from afar` : "cached blocks";
  const limit = role === "prefill" ? scheduling.ttft_slo_s : scheduling.tbt_slo_s;
  return limit ? `${Math.round(100 * pools[role])} % of the limit` : `${seconds(pools[role])} on average`;
}

function column(role, title) {
  const head = el("span", { class: "number" });
  const load = el("span", { class: "note" });
  const list = el("ul", { class: "cards" });
  const element = el("div", { class: `column ${role}` },
    el("h3", {}, title, " ", head, load), list);
  return { element, head, load, list };
}

/** Workers in their order; those of a group together, by stage, where the first of them stands. */
function framed(workers) {
  const frames = new Map();
  for (const worker of workers) {
    const key = frameOf(worker);
    if (frames.has(key)) frames.get(key).members.push(worker);
    else frames.set(key, worker.stage ? { group: worker.stage.group, n_stages: worker.stage.n_stages, members: [worker] } : worker);
  }
  for (const { members } of frames.values()) members?.sort((a, b) => a.stage.index - b.stage.index);
  return [...frames.values()];
}

/** Members with other numbers of stages are another group. */
const frameOf = ({ worker_id, stage }) => (stage ? `${stage.group} of ${stage.n_stages}` : worker_id);
const keyOf = (item) => (item.members ? `group ${frameOf(item.members[0])}` : item.worker_id);

function groupFrame() {
  return el("li", { class: "group" },
    el("p", { class: "group-head" }, el("span", { class: "name" }), el("span", { class: "note" })),
    el("ol", { class: "cards stages" }));
}

/** A group is given prompts only while it has a worker at each stage. */
function fillGroupFrame(element, { group, n_stages, members }) {
  const present = new Set(members.filter((w) => !w.isGone && !w.isAway && !w.refused && !w.draining).map(({ stage }) => stage.index));
  say(element.querySelector(".name"), group);
  say(element.querySelector(".note"), present.size === n_stages
    ? `long prompts in ${plural(n_stages, "stage")}`
    : `${present.size} of ${plural(n_stages, "stage")}: none is computed together`);
  element.classList.toggle("broken", present.size < n_stages);
}

function card(worker, onSetRole) {
  return el("li", { class: `card ${worker.role}` },
    el("div", { class: "card-head" }, el("span", { class: "name" }, worker.worker_id), el("span", { class: "state" })),
    el("div", { class: "meters" }),
    el("p", { class: "facts" }),
    roleLine(worker, onSetRole));
}

function fillCard(element, worker, cluster) {
  const [name, words] = stateOf(worker);
  element.dataset.state = name;
  say(element.querySelector(".state"), words);
  element.title = `${worker.worker_id} on ${worker.host}, start ${worker.generation}`;
  const { meters, facts } = worker.load ? describe(worker, cluster) : { meters: [], facts: worker.isAway ? `${worker.address}: ${worker.reason}; ${worker.advice}` : worker.reason ?? worker.refused };
  keyed(element.querySelector(".meters"), meters, (m) => m.label, meter, fillMeter);
  say(element.querySelector(".facts"), facts);
}

function stateOf(worker) {
  if (worker.isGone) return ["gone", `gone, ${ago(worker.s_ago)}`];
  if (worker.isAway) return ["unreachable", `unreachable for ${seconds(worker.for_s)}`];
  if (worker.refused) return ["refused", "refused"];
  if (worker.draining) return ["draining", "draining"];
  if (worker.heard_s_ago !== null && worker.heard_s_ago > SILENT_S) return ["silent", `silent for ${seconds(worker.heard_s_ago)}`];
  return ["live", busy(worker)];
}

function busy({ role, load }) {
  if (role === "prefill") return load.n_queued ? plural(load.n_queued, "prompt") : "idle";
  if (role === "decode") return load.n_running ? `${load.n_running} running` : "idle";
  return load.n_readers ? plural(load.n_readers, "reader") : "";
}

function describe({ role, load, stage }, { block_bytes, scheduling }) {
  if (role === "prefill") {
    const limit = scheduling.ttft_slo_s ?? Math.max(1, load.queue_s);
    return {
      meters: [
        { label: "queue", share: load.queue_s / limit, limited: scheduling.ttft_slo_s !== null, text: seconds(load.queue_s) },
        pages(load),
      ],
      facts: [
        stage ? `stage ${stage.index + 1} of ${stage.n_stages}` : null,
        load.queued_tokens ? `${plural(load.queued_tokens, "token")} to compute` : "nothing to compute",
      ].filter(Boolean).join(", "),
    };
  }
  if (role === "decode") {
    const limit = scheduling.tbt_slo_s ?? Math.max(0.1, load.tbt_s);
    return {
      meters: [{ label: "step", share: load.tbt_s / limit, limited: scheduling.tbt_slo_s !== null, text: seconds(load.tbt_s) }, pages(load)],
      facts: [
        load.n_running ? `${plural(load.context_tokens, "token")} of context` : null,
        load.n_reserved ? `${load.n_reserved} landing` : null,
      ].filter(Boolean).join(", ") || (load.step_s ? `last step ${seconds(load.step_s)}` : "no step yet"),
    };
  }
  const { memory, disk, lookups } = load;
  const asked = lookups.memory + lookups.disk + lookups.missing;
  const used = memory.n_stored + memory.n_reserved;
  const meters = [{ label: "memory", share: used / memory.n_blocks, text: bytes(used * block_bytes) }];
  if (disk.n_blocks) meters.push({ label: "disk", share: disk.n_stored / disk.n_blocks, text: bytes(disk.n_stored * block_bytes) });
  return {
    meters,
    facts: asked
      ? `${plural(load.n_indexed, "block")}, hits ${percent(lookups.memory + lookups.disk, asked)}` +
        (lookups.disk ? ` (disk ${percent(lookups.disk, asked)})` : "")
      : plural(load.n_indexed, "block"),
  };
}

function pages({ free_pages, n_pages }) {
  const used = n_pages - free_pages;
  return { label: "pages", share: n_pages ? used / n_pages : 0, text: percent(used, n_pages) };
}

function meter({ label }) {
  return el("div", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 },
    el("span", { class: "label" }, label),
    el("span", { class: "bar" }, el("span", { class: "fill" })),
    el("span", { class: "value" }));
}

/** Red means nearly full, or nearly at a limit; a quantity without a limit is never red. */
function fillMeter(element, { share, text, limited = true }) {
  const full = Math.min(1, Math.max(0, share));
  const fill = element.querySelector(".fill");
  fill.style.width = full > 0 ? `max(3px, ${full * 100}%)` : "0";
  fill.classList.toggle("high", limited && share > 0.9);
  element.setAttribute("aria-valuenow", Math.round(full * 100));
  element.setAttribute("aria-valuetext", text);
  say(element.querySelector(".value"), text);
}
