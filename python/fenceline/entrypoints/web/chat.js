// The chat: a conversation through /v1/chat/completions, streamed.

import { ApiError, events, request } from "/web/api.js";
import { copyButton } from "/web/copy.js";
import { allRead, hasImages, offerImages, picture, startImages, takeImages } from "/web/images.js";
import { showMarkdown } from "/web/markdown.js";

const $ = (id) => document.getElementById(id);
const composer = $("composer");
const entry = $("text");
const scroller = $("scroll");
const STORED = "fenceline.chat"; // in this tab alone, so that a reload keeps the conversation
const SUGGESTIONS = ["What is 12 + 30?", "Tell me a short story.", "What can you do?"];
const EXAMPLE_TOOL = [
  {
    type: "function",
    function: {
      name: "calculator",
      description: "Computes an arithmetic expression.",
      parameters: {
        type: "object",
        properties: { expression: { type: "string", description: "such as 12 * (3 + 4)" } },
        required: ["expression"],
      },
    },
  },
];

let turns = []; // what the API is sent: user, assistant, tool
let running = null; // the AbortController of the answer that is being written
let pending = []; // tool calls without a result: { call, field }
let tellChange = () => {};

// The conversation and the settings, for a reload. A conversation that is too long for that is not kept.
function store() {
  const fields = Object.fromEntries([...new FormData(composer)].filter(([name]) => name));
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ turns, fields }));
  } catch {
    sessionStorage.removeItem(STORED);
  }
}

// What was there before the page was loaded again. Calls that have no results yet can still be given some.
function restore() {
  const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
  if (stored === null) return;
  for (const [name, value] of Object.entries(stored.fields)) if (composer.elements[name]) composer.elements[name].value = value;
  let shown = null;
  for (const turn of (turns = stored.turns)) {
    if (turn.role === "user") showQuestion(turn.content);
    else if (turn.role === "tool") shown?.showResult(turn);
    else if (turn.content || turn.tool_calls) {
      shown = new Answer(addMessage("assistant", "Model"));
      shown.content = turn.content ?? "";
      shown.calls = turn.tool_calls ?? [];
      shown.end();
    }
  }
  if (turns.at(-1)?.role === "assistant") pending = shown?.askForResults() ?? [];
  scroller.scrollTop = scroller.scrollHeight;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function startChat({ onChange }) {
  tellChange = onChange;
  for (const text of SUGGESTIONS) {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => say(text));
    $("suggestions").append(button);
  }
  startImages();
  composer.addEventListener("submit", async (event) => {
    event.preventDefault();
    await allRead();
    if (!running && (entry.value.trim() || hasImages())) say(entry.value.trim());
  });
  entry.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    composer.requestSubmit();
  });
  entry.addEventListener("input", fitEntry);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  $("example-tool").addEventListener("click", () => {
    composer.elements.tools.value = JSON.stringify(EXAMPLE_TOOL, null, 2);
    store();
  });
  restore();
  composer.addEventListener("change", store);
  composer.addEventListener("reset", () => setTimeout(store)); // when the fields have been reset
  if (matchMedia("(pointer: fine)").matches) entry.focus(); // elsewhere it would open a keyboard over the page
}

function fitEntry() {
  entry.style.height = "auto";
  entry.style.height = `${Math.min(entry.scrollHeight + 2, 180)}px`;
}

// `controller` writes an answer now, or nobody (null).
function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  tellChange();
}

function clear() {
  running?.abort();
  setRunning(null);
  turns = [];
  pending = [];
  $("messages").replaceChildren();
  $("empty").hidden = false;
  $("clear").hidden = true;
  store();
  entry.focus();
}

function say(text) {
  giveResults(); // of calls that the person leaves unanswered
  document.querySelectorAll(".again").forEach((button) => button.remove());
  // Many templates want turns to alternate, also after an answer that failed or said nothing.
  if (turns.at(-1)?.role === "user") turns.push({ role: "assistant", content: "" });
  const images = takeImages().map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length ? [...images, ...(text ? [{ type: "text", text }] : [])] : text;
  turns.push({ role: "user", content });
  showQuestion(content);
  entry.value = "";
  store();
  fitEntry();
  scroller.scrollTop = scroller.scrollHeight;
  entry.focus();
  answer();
}

function showQuestion(content) {
  const message = addMessage("user", "You");
  const { text, urls } = partsOf(content);
  if (urls.length) message.append(make("div", "pictures"));
  urls.forEach((url, index) => {
    const shown = message.lastChild.appendChild(picture(url, `Image ${index + 1}`));
    shown.addEventListener("load", () => (scroller.scrollTop = scroller.scrollHeight)); // it had no height before
  });
  if (text) message.append(make("p", "said", text));
}

// A question's text, and the URLs of its images.
function partsOf(content) {
  if (typeof content === "string") return { text: content, urls: [] };
  const text = content.find((part) => part.type === "text")?.text ?? "";
  return { text, urls: content.flatMap((part) => part.image_url?.url ?? []) };
}

function addMessage(kind, who) {
  $("empty").hidden = true;
  $("clear").hidden = false;
  const message = make("article", `message ${kind}`);
  message.setAttribute("aria-label", who);
  message.append(make("h3", "who", who));
  $("messages").append(message);
  return message;
}

// The request's fields besides the conversation. Throws Error if a field of the settings is wrong.
function settings() {
  const fields = composer.elements;
  const chosen = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (!fields[name].checkValidity()) {
      $("settings").open = true;
      fields[name].reportValidity();
      throw new Error(`Settings: ${fields[name].labels[0].textContent.trim()} is not a value the server takes.`);
    }
    if (fields[name].value !== "") chosen[name] = Number(fields[name].value);
  }
  const tools = fields.tools.value.trim();
  if (tools) {
    try {
      chosen.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Settings: the tools are not JSON (${error.message}).`);
    }
    chosen.tool_choice = fields.tool_choice.value;
  }
  return chosen;
}

async function answer() {
  const shown = new Answer(addMessage("assistant", "Model"));
  const controller = new AbortController();
  setRunning(controller);
  try {
    const system = composer.elements.system.value.trim();
    const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
    const body = { messages, stream: true, stream_options: { include_usage: true }, ...settings() };
    const response = await request("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    for await (const event of events(response)) shown.add(event);
    shown.end();
  } catch (error) {
    if (controller.signal.aborted) shown.end("stopped");
    else shown.fail(error);
  }
  if (running !== controller) return; // a new chat has begun
  setRunning(null);
  if (shown.hasContent) turns.push(shown.turn());
  store();
  pending = shown.askForResults();
}

// What the person has written as results of the last answer's calls joins the conversation.
function giveResults() {
  for (const { call, field } of pending) {
    turns.push({ role: "tool", tool_call_id: call.id, content: field.value });
    field.readOnly = true;
  }
  pending.at(0)?.form.classList.add("given");
  pending = [];
  store();
}

// One answer as it arrives.
class Answer {
  constructor(message) {
    this.message = message;
    this.reasoning = this.content = "";
    this.calls = [];
    this.usage = this.reason = null;
    this.began = performance.now();
    this.firstAt = this.lastAt = 0;
    this.drawn = 0; // the frame that has been asked for
    message.setAttribute("aria-busy", "true");
    message.append((this.waiting = make("p", "waiting muted", "Waiting for the first token")));
  }

  get hasContent() {
    return this.content !== "" || this.calls.length > 0;
  }

  add(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content || reasoning || calls) {
      this.lastAt = performance.now();
      this.firstAt ||= this.lastAt;
    }
    if (reasoning) this.reasoning += reasoning;
    if (content) this.content += content;
    for (const part of calls ?? []) {
      const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      if (part.id) call.id = part.id;
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
    }
    this.drawn ||= requestAnimationFrame(() => {
      this.drawn = 0;
      this.draw();
    });
  }

  draw() {
    const follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    if (this.reasoning || this.hasContent) this.waiting.remove();
    if (this.reasoning) {
      this.thoughts ??= this.openThoughts();
      this.thoughts.querySelector("summary").textContent = this.hasContent ? "Reasoning" : "Reasoning …";
      showMarkdown(this.thoughts.querySelector("div"), this.reasoning);
    }
    if (this.content) {
      if (!this.text) this.message.append((this.text = make("div", "text")));
      showMarkdown(this.text, this.content);
    }
    this.calls.forEach((call, index) => this.drawCall(call, index));
    if (follows) scroller.scrollTop = scroller.scrollHeight;
  }

  openThoughts() {
    const details = make("details", "reasoning");
    details.append(make("summary"), make("div", "text"));
    this.message.append(details);
    return details;
  }

  drawCall(call, index) {
    this.callBoxes ??= [];
    if (!this.callBoxes[index]) {
      const box = (this.callBoxes[index] = make("div", "call"));
      const pre = make("pre");
      pre.tabIndex = 0;
      pre.append(make("code"));
      box.append(make("p", "call-name"), pre);
      this.message.append(box);
    }
    const box = this.callBoxes[index];
    box.querySelector(".call-name").textContent = `Calls ${call.function.name}`;
    box.querySelector("code").textContent = indented(call.function.arguments);
  }

  end(how) {
    cancelAnimationFrame(this.drawn);
    this.draw();
    this.waiting.remove();
    this.message.removeAttribute("aria-busy");
    if (!this.hasContent && !this.reasoning) this.message.append(make("p", "muted", "(no text)"));
    const meta = make("p", "meta muted", this.facts(how));
    if (this.content) meta.append(copyButton("Copy the answer", () => this.content));
    this.message.append(meta);
    this.follow();
  }

  facts(how) {
    const facts = [];
    if (this.usage) {
      facts.push(`${this.usage.completion_tokens} tokens`);
      const seconds = (this.lastAt - this.firstAt) / 1000;
      if (seconds > 0.05) facts.push(`${((this.usage.completion_tokens - 1) / seconds).toFixed(0)} a second`);
    }
    if (this.firstAt) facts.push(`first after ${((this.firstAt - this.began) / 1000).toFixed(2)} s`);
    if (how) facts.push(how);
    if (this.reason === "length") facts.push("cut at the most tokens");
    return facts.join(" · ");
  }

  fail(error) {
    this.end();
    const lost = error instanceof ApiError || error.message.startsWith("Settings") ? "" : "The server is not reachable: ";
    const notice = make("p", "notice", lost + error.message);
    notice.setAttribute("role", "alert");
    const again = make("button", "again", "Try again");
    again.type = "button";
    again.addEventListener("click", () => {
      if (running) return;
      if (this.hasContent) turns.pop();
      pending = [];
      store();
      this.message.remove();
      answer();
    });
    this.message.append(notice, again);
    if (turns.at(-1).role === "user") this.message.append(this.backButton());
    this.follow();
  }

  // Gives the question back to the person: as it is, the server may refuse all that follows it too.
  backButton() {
    const back = make("button", "again", "Edit the question");
    back.type = "button";
    back.addEventListener("click", () => {
      if (running) return;
      if (this.hasContent) turns.pop();
      const { text, urls } = partsOf(turns.pop().content);
      this.message.previousElementSibling.remove();
      this.message.remove();
      if (!turns.length) clear();
      store();
      entry.value = [text, entry.value].filter(Boolean).join("\n");
      fitEntry();
      offerImages(urls.map((url) => ({ url })));
      entry.focus();
    });
    return back;
  }

  follow() {
    scroller.scrollTop = scroller.scrollHeight;
  }

  turn() {
    const turn = { role: "assistant", content: this.content || null };
    if (this.calls.length) turn.tool_calls = this.calls;
    return turn;
  }

  // A result that was given before the page was loaded again.
  showResult(turn) {
    const box = this.callBoxes?.[this.calls.findIndex((call) => call.id === turn.tool_call_id)];
    if (!box) return;
    const label = box.appendChild(make("label", "", "Result"));
    const field = label.appendChild(make("textarea"));
    field.value = turn.content;
    field.readOnly = true;
    field.rows = 1;
  }

  // Fields for the results of the calls, if there are any: a person stands in for the tools.
  askForResults() {
    if (!this.calls.length || this.reason === "length" || this.message.querySelector(".notice")) return [];
    const form = make("form", "results");
    const asked = this.calls.map((call, index) => {
      const label = make("label", "", `Result of ${call.function.name}`);
      const field = make("textarea");
      field.rows = 1;
      label.append(field);
      this.callBoxes[index].append(label);
      return { call, field, form };
    });
    const send = make("button", "", asked.length > 1 ? "Send the results" : "Send the result");
    form.append(send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (running) return;
      giveResults();
      answer();
    });
    for (const { field } of asked) {
      field.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing || field.readOnly) return;
        event.preventDefault();
        form.requestSubmit();
      });
    }
    this.message.append(form);
    asked[0].field.focus();
    this.follow();
    return asked;
  }
}

// Arguments that are whole, indented; others as they are so far.
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
