// The last steps as the streams ran them, with their edges. The recorder keeps the order of events and no times: every
// step has the same width.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const LABEL = 66; // the rows' names
const STEP = 42; // from launch to launch
const LAUNCH = 7;
const WAITED = 17; // of a step whose results the next launch waits for
const SHIFT = 7; // from the end of a launch to the start of its step
const ROW = 36;
const BOX = 14;
const KINDS = { extend: "prefill", decode: "decode" };

export function startTimeline() {
  const host = $("timeline");
  let live = null;
  let chosen = null; // the serial of the step that the pointer or the keys are at
  let held = null; // what is drawn while somebody looks closely

  const draw = () => {
    const shown = held ?? live;
    if (shown) drawSteps(host, shown, chosen);
  };
  const hold = (isHeld) => {
    held = isHeld ? (held ?? live) : null;
    $("held").hidden = held === null;
  };
  const choose = (done) => {
    hold(done !== null);
    if (chosen === done) return;
    chosen = done;
    draw();
  };
  host.addEventListener("pointermove", (event) => {
    const step = event.target.closest?.("[data-done]");
    if (step) choose(Number(step.dataset.done));
  });
  host.addEventListener("pointerleave", () => choose(null));
  host.addEventListener("blur", () => choose(null));
  host.addEventListener("keydown", (event) => {
    const steps = (held ?? live)?.recorded?.steps ?? [];
    if (!["ArrowLeft", "ArrowRight", " "].includes(event.key) || !steps.length) return;
    event.preventDefault();
    if (event.key === " " && held !== null) return choose(null);
    if (event.key === " ") return choose(steps.at(-1).done);
    const drawn = steps.slice(-numDrawn(host));
    const at = chosen === null ? drawn.length : drawn.findIndex((step) => step.done === chosen);
    const next = at + (event.key === "ArrowLeft" ? -1 : 1);
    choose(drawn[Math.max(0, Math.min(next, drawn.length - 1))].done);
  });
  addEventListener("resize", draw);
  return {
    show(news) {
      live = news;
      if (held === null) draw();
    },
  };
}

function numDrawn(host) {
  return Math.max(2, Math.floor((host.clientWidth - LABEL - 10) / STEP));
}

function make(tag, attributes, title) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (title) {
    const text = document.createElementNS(SVG, "title");
    text.textContent = title;
    element.append(text);
  }
  return element;
}

function drawSteps(host, live, chosen) {
  const steps = (live.recorded?.steps ?? []).slice(-numDrawn(host));
  if (!steps.length) {
    const why = live.records_steps ? "No steps yet." : "The flight recorder is off (--flight-recorder-steps 0).";
    if (host.textContent !== why) host.replaceChildren(Object.assign(document.createElement("p"), { textContent: why }));
    host.firstChild.className = "muted";
    $("step").textContent = "";
    $("timeline-legend").replaceChildren();
    return;
  }
  const rows = ["host", "forward", ...(live.state.hicache ? ["load", "store"] : [])];
  const width = Math.max(host.clientWidth, LABEL + 2 * STEP);
  const height = rows.length * ROW + 6;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  const y = (row) => 4 + rows.indexOf(row) * ROW + (ROW - BOX) / 2;
  for (const row of rows) {
    const label = make("text", { x: 0, y: y(row) + 11, class: "row-name" });
    label.textContent = row.toUpperCase();
    const line = y(row) + BOX / 2;
    svg.append(label, make("line", { x1: LABEL - 6, x2: width, y1: line, y2: line, class: "row-line" }));
  }
  const boxes = make("g", {});
  const edges = make("g", { class: "edges" });
  const x = (index) => LABEL + index * STEP;
  const ends = steps.map((_, index) => {
    const overlaps = index + 1 < steps.length && steps[index + 1].in_flight > 0;
    return x(index) + LAUNCH + (overlaps ? STEP - 2 + SHIFT : WAITED + SHIFT);
  });
  let num_published = steps.length ? Math.max(0, -steps[0].in_flight) : 0;
  const publishBefore = (index, until) => {
    // Between two launches: behind the end of the step whose results they are.
    for (let place = 0; num_published < until; num_published++, place++) {
      const end = ends[num_published];
      const at = Math.max(end + 3, x(index - 1) + LAUNCH + 5) + 4 * place;
      const title = `Step ${steps[num_published].done}: results published`;
      boxes.append(make("rect", { x: at, y: y("host"), width: 3, height: BOX, class: "publish" }, title));
      edges.append(arrow(end - 3, y("forward"), at + 1.5, y("host") + BOX, "results"));
    }
  };
  steps.forEach((step, index) => {
    if (index) publishBefore(index, index - step.in_flight);
    drawStep({ boxes, edges, y, rows }, step, x(index), ends[index], step.done === chosen);
  });
  publishBefore(steps.length, steps.filter((step) => step.published).length);
  svg.append(edges, boxes);
  host.replaceChildren(svg);
  const told = steps.find((step) => step.done === chosen) ?? steps.at(-1);
  $("step").textContent = describe(told);
  legend(rows);
}

function drawStep({ boxes, edges, y, rows }, step, x, end, isChosen) {
  const title = describe(step);
  const group = make("g", { "data-done": step.done, class: isChosen ? "step chosen" : "step" });
  const start = x + LAUNCH + SHIFT;
  group.append(
    make("rect", { x: x - 2, y: 0, width: STEP, height: rows.length * ROW + 6, class: "hit" }, title),
    make("rect", { x, y: y("host"), width: LAUNCH, height: BOX, rx: 1.5, class: "launch" }),
    make("rect", {
      x: start + 1,
      y: y("forward"),
      width: end - start - 1,
      height: BOX,
      rx: 2,
      class: step.mode + (step.published ? "" : " in-flight"),
    }),
  );
  edges.append(arrow(x + LAUNCH / 2, y("host") + BOX, start + 4, y("forward"), "launch"));
  if (step.events.left) {
    const at = x - 3;
    group.append(make("circle", { cx: at, cy: y("host") - 1, r: 2.5, class: "left" }));
  }
  for (const kind of Object.keys(step.events.transfers ?? {})) {
    if (!rows.includes(kind)) continue;
    group.append(make("rect", { x: x - 12, y: y(kind), width: 12, height: BOX, rx: 2, class: "transfer" }));
  }
  for (const [stream] of step.after) {
    if (rows.includes(stream)) edges.append(arrow(x - 2, y(stream), start + 3, y("forward") + BOX, "pages"));
  }
  boxes.append(group);
}

function arrow(x1, y1, x2, y2, kind) {
  const down = y2 > y1 ? -1 : 1;
  const line = `M${x1} ${y1}L${x2} ${y2}`;
  const head = `M${x2 - 2.5} ${y2 + 3.5 * down}L${x2} ${y2}L${x2 + 2.5} ${y2 + 3.5 * down}`;
  return make("path", { d: line + head, class: kind });
}

function describe(step) {
  const plural = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
  const facts = [
    `Step ${step.done}: ${KINDS[step.mode]}, ${plural(step.reqs, "request")}, ${plural(step.tokens, "token")}`,
    step.in_flight ? `launched while ${plural(step.in_flight, "step")} ran` : "launched when nothing ran",
  ];
  if (!step.published) facts.push("still running");
  const left = Object.entries(step.events.left ?? {}).map(([why, count]) => `${count} ${why}`);
  if (left.length) facts.push(`before it requests left: ${left.join(", ")}`);
  if (step.events.retired_pages) facts.push(`${plural(step.events.retired_pages, "page")} given back`);
  for (const [stream, edge] of step.after) facts.push(`takes over pages of ${stream.toUpperCase()} (${edge})`);
  return facts.join("; ") + ".";
}

function legend(rows) {
  const entries = [
    ["launch", "launch"],
    ["extend", "prefill"],
    ["decode", "decode"],
    ["publish", "results"],
    ["left", "a request left"],
    ...(rows.length > 2 ? [["transfer", "transfer"]] : []),
  ];
  const list = $("timeline-legend");
  if (list.children.length === entries.length) return;
  list.replaceChildren(
    ...entries.map(([kind, text]) => {
      const item = document.createElement("li");
      item.dataset.kind = kind;
      item.textContent = text;
      return item;
    }),
  );
}
