// Asks the conductor once a second and shows what it says; less often when nobody looks.

import { Activity } from "./activity.js";
import * as api from "./api.js";
import { Chart } from "./chart.js";
import { showConfiguration } from "./configuration.js";
import { Decisions, keyOf } from "./decisions.js";
import { byId, el, say } from "./dom.js";
import { ClusterMap } from "./map.js";
import { Playground } from "./playground.js";
import { Pool } from "./pool.js";
import { anyCanChange, showNextChange } from "./roles.js";
import { showSummary } from "./summary.js";
import { startTheme } from "./theme.js";

const EVERY_S = 1;
const HIDDEN_S = 15;
const LONGEST_S = 15;
const KEPT_S = 610;
const RANGES = [[60, "1 min"], [300, "5 min"], [600, "10 min"]];

const state = {
  cluster: null,
  /** What /debug/roles says; null: no worker can change its role. */
  roles: null,
  decisions: [],
  /** Those that were searched for; null: nothing is. */
  found: null,
  decisionsNow: 0,
  errors: {},
  refusals: {},
  points: [],
  pointsNow: 0,
  /** Seconds of /debug/activity, and the workers that joined and left. */
  activity: [],
  activityNow: 0,
  events: [],
  /** Part of a request id; only decisions on such requests are shown. */
  searched: "",
  limits: { ttft: null, tbt: null },
  selectedId: null,
  selected: null,
  holders: new Set(),
  /** Seconds; null: as many as there are points of. */
  range: null,
};
let revision = -1;
let failures = 0;
let timer = 0;
let asking = false;
let searchShown = "";
let modelAsked = null;
/** The revision counts from 0 again when the conductor was started again; its clocks may too. */
let lastNow = 0;

startTheme();
const map = new ClusterMap(async (worker, role) => {
  await api.post(`debug/roles/${encodeURIComponent(worker)}`, { role });
  poll();
});
const charts = {
  ttft: new Chart(byId("ttft"), { title: "Time to first token", what: "p50 · p90", kind: "prefill" }),
  tbt: new Chart(byId("tbt"), { title: "Time between tokens", what: "p50 · p90", kind: "decode" }),
};
const activity = new Activity();
const pool = new Pool((holders) => {
  state.holders = new Set(holders);
  show();
});
const decisions = new Decisions((key) => {
  state.selectedId = state.selectedId === key ? null : key;
  show();
});
const playground = new Playground({
  onShow: openDecision,
  onKeyNeeded: () => askForKey("This key is not valid here."),
  onRun: () => poll(),
});
startRange();
startSearch();
startKey();
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    await ask();
    failures = 0;
    byId("banner").hidden = true;
    document.body.classList.remove("stale");
    setLive("live", "live");
    show();
  } catch (error) {
    failed(error);
  }
  asking = false;
  const pause = failures ? Math.min(LONGEST_S, 2 ** (failures - 1)) : EVERY_S;
  timer = setTimeout(poll, 1000 * (document.hidden ? Math.max(HIDDEN_S, pause) : pause));
}

async function ask() {
  let cluster;
  try {
    cluster = await api.get("debug/cluster");
  } catch (error) {
    if (error.status === 403) await askModels("");
    throw error;
  }
  if (cluster.now_s < lastNow) restart();
  lastNow = cluster.now_s;
  const after = state.points.at(-1)?.at_s ?? 0;
  const latencies = await api.get(`debug/latencies?after_s=${after}`);
  const newest = state.activity.at(-1)?.at_s ?? 0;
  const active = await api.get(`debug/activity?after_s=${newest}`);
  if (cluster.revision !== revision || !state.cluster || state.searched !== searchShown) {
    const answer = await api.get("debug/decisions?last=60");
    searchShown = state.searched;
    const only = `request_id=${encodeURIComponent(searchShown)}`;
    state.found = searchShown ? (await api.get(`debug/decisions?last=60&${only}`)).decisions : null;
    Object.assign(state, { decisions: answer.decisions, errors: answer.errors, refusals: answer.refusals });
    revision = cluster.revision;
  }
  state.roles = anyCanChange(cluster) ? await api.get("debug/roles") : null;
  state.cluster = cluster;
  state.decisionsNow = cluster.now_s;
  state.pointsNow = latencies.now_s;
  state.limits = { ttft: latencies.ttft_slo_s, tbt: latencies.tbt_slo_s };
  state.points = [...state.points, ...latencies.seconds].filter((p) => p.at_s > latencies.now_s - KEPT_S);
  Object.assign(state, { activityNow: active.now_s, events: active.events });
  state.activity = [...state.activity, ...active.seconds].filter((s) => s.at_s > active.now_s - KEPT_S);
  await askModels(cluster.model);
}

/** Only when it may have changed: with a key it counts as a request. */
async function askModels(model) {
  if (model === modelAsked) return;
  playground.showModels((await api.get("v1/models")).data);
  modelAsked = model;
}

function restart() {
  revision = -1;
  state.points = [];
  state.activity = [];
}

function show() {
  if (!state.cluster) return;
  state.selected = selectedDecision();
  say(byId("model"), state.cluster.model || "no model yet");
  showSummary(state);
  map.show(state);
  showNextChange(state.roles);
  const range = showRange();
  for (const kind of ["ttft", "tbt"]) {
    const points = state.points.filter((p) => p[kind]).map((p) => ({ at_s: p.at_s, ...p[kind] }));
    charts[kind].show(points, state.pointsNow, state.limits[kind], range);
  }
  activity.show(state, range);
  decisions.show(state);
  showConfiguration(state.cluster);
  pool.show(state);
  playground.showDecisions(state.decisions);
}

/** The open one; what it was last, once newer ones have taken its place among those that are sent. */
function selectedDecision() {
  const known = [...state.decisions, ...(state.found ?? []), ...(state.selected ? [state.selected] : [])];
  return known.find((d) => keyOf(d) === state.selectedId) ?? null;
}

function openDecision(requestId) {
  const found = state.decisions.findLast((d) => d.request_id.split("~")[0] === requestId);
  if (!found) {
    search(requestId);
    return;
  }
  state.selectedId = null; // so that the list goes on to the newest first
  show();
  state.selectedId = keyOf(found);
  show();
  document.querySelector("tr.decision.selected")?.scrollIntoView({ block: "center", behavior: "auto" });
}

// -- what can go wrong ---------------------------------------------------------------------------

function failed(error) {
  failures += 1;
  document.body.classList.add("stale");
  if (error.status === 401) {
    setLive("needs-key", "needs a key");
    if (failures === 1) askForKey(api.key.get() ? "This key is not valid here." : "");
    banner("An operator's API key, or what `halfmoon operator-token` prints, is needed to see the cluster.", "Enter a key", () => askForKey(""));
  } else if (error.status === 403) {
    setLive("needs-key", "no operator");
    byId("key-button").hidden = false;
    banner("This key is no operator's: the playground works, the cluster is not shown.", "Another key", () => askForKey(""));
  } else {
    setLive("lost", "not connected");
    const what = error.status ? error.message : "The conductor does not answer.";
    banner(`${what} What is shown is from before; it is asked again and again.`, "Ask now", () => poll());
  }
}

function banner(text, action, act) {
  const element = byId("banner");
  if (element.dataset.text !== text || element.hidden) {
    element.dataset.text = text;
    element.replaceChildren(el("span", {}, text), el("button", { type: "button", onclick: act }, action));
  }
  element.hidden = false;
}

function setLive(name, text) {
  byId("live").dataset.state = name;
  say(byId("live"), text);
}

// -- controls ------------------------------------------------------------------------------------

function startRange() {
  byId("range").append(...RANGES.map(([seconds, name]) =>
    el("button", { type: "button", value: seconds, onclick: () => { state.range = seconds; show(); } }, name)));
}

function startSearch() {
  byId("search").addEventListener("input", (event) => search(event.target.value.trim()));
  byId("configuration").addEventListener("toggle", () => show());
}

/** Show only decisions on requests with this in their ids. */
function search(text) {
  if (byId("search").value.trim() !== text) byId("search").value = text;
  state.searched = text;
  state.selectedId = null;
  poll();
}

/** The one that was chosen, or the shortest that has all points. */
function showRange() {
  const oldest_s = state.pointsNow - (state.points[0]?.at_s ?? state.pointsNow);
  const range = state.range ?? (RANGES.find(([seconds]) => seconds >= oldest_s) ?? RANGES.at(-1))[0];
  for (const button of byId("range").children) button.setAttribute("aria-pressed", String(Number(button.value) === range));
  return range;
}

/**
 * `halfmoon up` prints the page's address with the operators' token behind #, which no server is
 * sent. It is kept as a typed one is, and leaves the address bar. No other key is taken from there:
 * a link from elsewhere must not choose the tenant that questions are asked as.
 */
function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return false;
  history.replaceState(null, "", location.pathname + location.search);
  if (!/^[0-9a-f]{64}$/.test(token)) return false;
  api.key.set(token);
  return true;
}

function startKey() {
  const dialog = byId("key-dialog");
  takeToken();
  addEventListener("hashchange", () => {
    if (!takeToken()) return;
    byId("key-button").hidden = false;
    if (dialog.open) dialog.close("");
    else poll();
  });
  byId("key-button").addEventListener("click", () => askForKey(""));
  byId("key-button").hidden = !api.key.get();
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "save") api.key.set(byId("key-input").value.trim());
    byId("key-input").value = "";
    byId("key-button").hidden = !api.key.get();
    poll();
  });
}

function askForKey(problem) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  dialog.returnValue = "";
  dialog.classList.toggle("wrong", Boolean(problem));
  dialog.dataset.problem = problem;
  dialog.showModal();
}
