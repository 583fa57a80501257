// The server live: its figures a few times a second, as long as somebody can see them.

import { ApiError, request } from "/web/api.js";
import { setImageLimits } from "/web/images.js";
import { startTimeline } from "/web/timeline.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 300;
const LOST_MS = 2000;
const HISTORY_S = 60;
const RATE_OVER_S = 1.5;
const TIERS = { device: "device", host: "host memory", storage: "storage" };
const number = new Intl.NumberFormat("en");
const milliseconds = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

let samples = []; // [seconds, tokens generated since the start]
let rates = []; // [seconds, tokens a second]
let latencies = []; // [seconds, sums and counts since the start]
let timer = 0;
let polling = false;
let locked = false; // the person would not give a key
let timeline;

export function startServerView() {
  timeline = startTimeline();
  document.addEventListener("visibilitychange", look);
  matchMedia("(max-width: 900px)").addEventListener("change", look);
  $("trace").addEventListener("click", saveTrace);
  $("unlock").addEventListener("click", () => {
    locked = false;
    look();
  });
  poll(); // also on a narrow screen, where the view is not shown at first: the header names the model
  return { look };
}

function inSight() {
  return !document.hidden && $("server").offsetParent !== null;
}

// Ask now if somebody can see the answer.
function look() {
  clearTimeout(timer);
  if (inSight() && !locked) poll();
}

async function poll() {
  if (polling) return;
  polling = true;
  let wait = POLL_MS;
  try {
    const live = await (await request("/live_state")).json();
    show(live);
    say(live.state.paused ? "waiting" : "fine", live.state.paused ? "Paused" : "Serving");
  } catch (error) {
    wait = LOST_MS;
    locked = error instanceof ApiError && error.status === 401;
    if (locked) say("lost", "Key needed");
    else if (error instanceof ApiError) say("waiting", error.status === 503 ? "Not serving" : "Error", error.message);
    else say("lost", "Not reachable");
  }
  $("unlock").hidden = !locked;
  polling = false;
  if (inSight() && !locked) timer = setTimeout(poll, wait);
}

function say(kind, text, why = "") {
  $("server").classList.toggle("old", kind === "lost"); // the figures are those of a server that answered
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").dataset.kind = kind;
  $("server-notice").hidden = !why;
  $("server-notice").textContent = why;
}

function show(live) {
  const { state } = live;
  $("model").textContent = live.model;
  $("model").title = `version ${live.version}, ${number.format(live.context_length)} tokens of context`;
  $("empty-model").textContent = live.model;
  document.title = `Fenceline · ${live.model}`;
  setImageLimits(live);
  $("running").textContent = number.format(state.num_running_reqs);
  $("running-most").textContent = `of ${number.format(live.max_running_requests)}`;
  $("queued").textContent = number.format(state.num_queue_reqs);
  $("queued-note").textContent = state.num_queue_reqs ? "waiting" : "";
  showRate(live.time, state.num_generated_tokens);
  showKv(state);
  showHits(state);
  showGraphs(state);
  $("accept-row").hidden = state.avg_spec_accept_length == null;
  $("accept").textContent = `${(state.avg_spec_accept_length ?? 0).toFixed(2)} tokens a step`;
  $("retractions").textContent = number.format(state.num_retractions);
  showLatency(live.time, live.latency);
  timeline.show(live);
}

function showRate(time, generated) {
  const last = samples.at(-1);
  if (last && (generated < last[1] || time < last[0])) samples = rates = []; // another server
  if (!last || time > last[0]) {
    samples = [...samples.filter(([then]) => time - then < 10), [time, generated]];
    const [then, before] = samples.find(([then]) => time - then <= RATE_OVER_S) ?? last;
    const base = then < time ? [then, before] : (last ?? [time - 1, generated]);
    const rate = (generated - base[1]) / (time - base[0]);
    rates = [...rates.filter(([then]) => time - then < HISTORY_S), [time, rate]];
  }
  const now = rates.at(-1)?.[1] ?? 0;
  $("rate").textContent = number.format(Math.round(now));
  drawRates(time);
}

function drawRates(time) {
  const svg = $("rate-line");
  const width = svg.clientWidth || 100;
  const height = svg.clientHeight || 22;
  const most = Math.max(1, ...rates.map(([, rate]) => rate));
  const points = rates.map(([then, rate]) => [
    width * (1 - (time - then) / HISTORY_S),
    height - 1.5 - (height - 3) * (rate / most),
  ]);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(line);
}

function showKv(state) {
  const percent = 100 * state.token_usage;
  $("kv").textContent = `${percent.toFixed(percent && percent < 10 ? 1 : 0)}%`;
  const cached = (100 * state.num_evictable_tokens) / state.max_total_num_tokens;
  const told = `${percent.toFixed(1)}% of the KV cache is held by requests, ${cached.toFixed(1)}% keeps prefixes for later ones`;
  showBar($("kv-bar"), [["kv", percent], ["cached", cached]], told);
  const [held, kept, all] = [state.num_used_tokens, state.num_evictable_tokens, state.max_total_num_tokens].map(number.format);
  showLegend($("kv-legend"), [["kv", `held by requests ${held}`], ["cached", `cached ${kept}`], ["none", `of ${all} tokens`]]);
}

function showHits(state) {
  const percent = 100 * state.cache_hit_rate;
  const tokens = state.hicache ? state.hicache.cached_tokens : { device: state.num_cached_tokens };
  const sum = Object.values(tokens).reduce((total, one) => total + one, 0);
  const parts = Object.entries(tokens).map(([tier, count]) => [tier, sum ? (percent * count) / sum : 0]);
  $("hits").textContent = `${percent.toFixed(0)}%`;
  const told = parts.map(([tier, part]) => `${TIERS[tier]} ${part.toFixed(0)}%`).join(", ");
  showBar($("hits-bar"), parts, `Found: ${told}; the rest was computed`);
  const entries = Object.entries(tokens).map(([tier, count]) => [tier, `${TIERS[tier]} ${number.format(count)}`]);
  showLegend($("hits-legend"), [...entries, ["none", "computed"]]);
}

// Means of the last minute, from sums and counts since the start.
function showLatency(time, latency) {
  const last = latencies.at(-1);
  if (last && time < last[0]) latencies = []; // another server
  latencies = [...latencies.filter(([then]) => time - then < HISTORY_S), [time, latency]];
  for (const name of ["ttft", "itl"]) {
    const [sum, count] = [0, 1].map((index) => latency[name][index] - latencies[0][1][name][index]);
    $(name).textContent = count > 0 ? `${milliseconds.format((1000 * sum) / count)} ms` : "–";
  }
}

function showGraphs(state) {
  const graphs = [state.cuda_graphs, state.piecewise_cuda_graphs].filter(Boolean);
  const sum = (name) => graphs.reduce((total, graph) => total + graph[name], 0);
  const eligible = sum("eligible_steps");
  const share = eligible ? ` (${((100 * sum("replays")) / eligible).toFixed(1)}%)` : "";
  $("replays").textContent = graphs.length
    ? `${number.format(sum("replays"))} of ${number.format(eligible)} eligible steps${share}`
    : "no graphs captured";
  const repairs = graphs.flatMap((graph) => Object.entries(graph.repairs));
  const count = repairs.reduce((total, [, one]) => total + one, 0);
  const why = repairs.map(([reason, one]) => `${reason} ${one}`).join(", ");
  $("repairs").textContent = count ? `${number.format(count)} (${why})` : graphs.length ? "0" : "–";
}

export function showBar(bar, parts, label) {
  if (bar.getAttribute("aria-label") !== label) bar.setAttribute("aria-label", label);
  parts.forEach(([kind, percent], index) => {
    const part = bar.children[index] ?? bar.appendChild(document.createElement("span"));
    part.dataset.kind = kind;
    part.style.width = `${percent}%`;
  });
}

// Writes only what has changed: a page that is rewritten three times a second cannot be selected or read out.
function showLegend(list, entries) {
  entries.forEach(([kind, text], index) => {
    const item = list.children[index] ?? list.appendChild(document.createElement("li"));
    item.dataset.kind = kind;
    if (item.textContent !== text) item.textContent = text;
  });
}

async function saveTrace() {
  $("trace").disabled = true;
  $("trace-note").textContent = "Making the trace";
  try {
    const trace = await (await request("/flight_recorder?format=trace", { admin: true })).blob();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(trace);
    link.download = `fenceline-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.trace.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    $("trace-note").textContent = `Saved as ${link.download}: open it in ui.perfetto.dev or chrome://tracing.`;
  } catch (error) {
    $("trace-note").textContent = error.message;
  }
  $("trace").disabled = false;
}
