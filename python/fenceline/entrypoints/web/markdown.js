// A model's text as elements: paragraphs, headings, lists, quotes, tables, code, bold, italic and links.
//
// The text only ever becomes textContent, and the address of a link; only http and https are links. Nothing of it is
// read as HTML, and there are no images: what a model writes can neither run nor load anything. Each function looks at a
// character a fixed number of times, since a model may write anything.

import { copyButton } from "/web/copy.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/; // between a table's head and its rows
const LINK = /\[([^[\]\n]+)\]\((https?:\/\/[^\s()[\]<>"]+)\)/y;

// Shows `text` in `parent`. Blocks that are there already stay, so that a growing text costs its last block.
export function showMarkdown(parent, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, index) => {
    const there = parent.children[index];
    if (there?.dataset.source === block.source) return;
    const element = elementOf(block);
    element.dataset.source = block.source;
    if (there) there.replaceWith(element);
    else parent.append(element);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
}

function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  const take = (belongs) => {
    const first = at++;
    while (at < lines.length && belongs(lines[at])) at++;
    return lines.slice(first, at);
  };
  const isTable = (head) => lines[head].includes("|") && RULE.test(lines[head + 1] ?? "") && lines[head + 1].includes("-");
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    let block;
    if (!line.trim()) {
      at++;
      continue;
    } else if (fence) {
      const isEnd = (text) => text.length >= fence[1].length && text === fence[1][0].repeat(text.length);
      const taken = take((next) => !isEnd(next.trim()));
      block = { kind: "code", language: fence[2], lines: taken.slice(1), taken };
      at++; // the end, if it is there yet
    } else if (heading) {
      block = { kind: "heading", level: heading[1].length, lines: [heading[2]], taken: take(() => false) };
    } else if (isTable(at)) {
      const taken = take((next) => next.includes("|"));
      block = { kind: "table", lines: taken, taken };
    } else if (ITEM.test(line)) {
      const taken = take((next) => next.trim() !== "" && !FENCE.test(next));
      block = { kind: "list", lines: taken, taken };
    } else if (/^\s*>/.test(line)) {
      const taken = take((next) => /^\s*>/.test(next));
      block = { kind: "quote", lines: taken.map((one) => one.replace(/^\s*> ?/, "")), taken };
    } else {
      const isText = (next) => next.trim() && !FENCE.test(next) && !ITEM.test(next) && !/^#{1,6}\s/.test(next);
      const taken = take((next) => isText(next) && !isTable(at));
      block = { kind: "text", lines: taken, taken };
    }
    block.source = block.kind + "\n" + block.taken.join("\n");
    blocks.push(block);
  }
  return blocks;
}

function elementOf(block) {
  switch (block.kind) {
    case "code": {
      const box = document.createElement("div");
      box.className = "code";
      const pre = document.createElement("pre");
      const code = document.createElement("code");
      code.textContent = block.lines.join("\n");
      if (block.language) pre.dataset.language = block.language;
      pre.tabIndex = 0; // it may scroll
      pre.append(code);
      box.append(pre, copyButton("Copy the code", () => code.textContent));
      return box;
    }
    case "table":
      return tableOf(block.lines);
    case "heading":
      return withInline(document.createElement(`h${Math.min(block.level + 2, 6)}`), block.lines[0]);
    case "list":
      return listOf(block.lines);
    case "quote":
      return withInline(document.createElement("blockquote"), block.lines.join("\n"));
    default:
      return withInline(document.createElement("p"), block.lines.join("\n"));
  }
}

function listOf(lines) {
  const first = ITEM.exec(lines[0]);
  const list = document.createElement(/\d/.test(first[2]) ? "ol" : "ul");
  if (list.tagName === "OL") list.start = parseInt(first[2], 10);
  const items = []; // [indent, text]
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) items.push([item[1].length, item[3]]);
    else items.at(-1)[1] += "\n" + line.trim();
  }
  for (const [indent, text] of items) {
    const element = withInline(document.createElement("li"), text);
    if (indent > first[1].length) element.className = "deeper";
    list.append(element);
  }
  return list;
}

function tableOf(lines) {
  const box = document.createElement("div");
  box.className = "table";
  box.tabIndex = 0; // it may scroll
  const table = box.appendChild(document.createElement("table"));
  lines.forEach((line, index) => {
    if (index === 1) return; // the rule
    const row = table.insertRow();
    for (const cell of line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|")) {
      row.append(withInline(document.createElement(index ? "td" : "th"), cell.trim()));
    }
  });
  return box;
}

// Runs of backticks by their length: where each begins, in order.
function ticksOf(text) {
  const runs = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (!runs.has(run[0].length)) runs.set(run[0].length, { starts: [], next: 0 });
    runs.get(run[0].length).starts.push(run.index);
  }
  return runs;
}

function withInline(element, text) {
  const ticks = ticksOf(text);
  let from = 0; // what has been written
  let at = 0;
  const put = (tag, content, end) => {
    element.append(text.slice(from, at));
    const part = element.appendChild(document.createElement(tag));
    part.textContent = content;
    from = at = end;
    return part;
  };
  // Text between `mark` and the next one, if it neither is empty nor begins with a space.
  const between = (mark) => {
    const end = text.indexOf(mark, at + mark.length);
    return end < at + mark.length + 1 || /\s/.test(text[at + mark.length]) ? null : end;
  };
  while (at < text.length) {
    const one = text[at];
    if (one === "`") {
      let width = 1;
      while (text[at + width] === "`") width++;
      const runs = ticks.get(width);
      while (runs.starts[runs.next] <= at) runs.next++;
      const end = runs.starts[runs.next];
      if (end === undefined) at += width;
      else put("code", text.slice(at + width, end), end + width);
    } else if (text.startsWith("**", at)) {
      const end = between("**");
      if (end === null) at += 2;
      else put("strong", text.slice(at + 2, end), end + 2);
    } else if (one === "*") {
      const end = between("*");
      if (end === null || /\w/.test(text[end + 1] ?? "")) at++;
      else put("em", text.slice(at + 1, end), end + 1);
    } else if (one === "[") {
      LINK.lastIndex = at;
      const found = LINK.exec(text);
      if (found === null) at++;
      else {
        const link = put("a", found[1], LINK.lastIndex);
        link.href = link.title = found[2];
        link.target = "_blank";
        link.rel = "noopener noreferrer";
      }
    } else at++;
  }
  element.append(text.slice(from));
  return element;
}
