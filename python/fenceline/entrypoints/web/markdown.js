// A model's text as elements: paragraphs, headings, lists, quotes, code, bold and italic.
//
// The text only ever becomes textContent. Nothing of it is read as HTML, and there are no links and no images: what a
// model writes can neither run nor load anything.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|\*(?=\S)([^*]+?)\*(?!\w)/s;

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
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    let block;
    if (!line.trim()) {
      at++;
      continue;
    } else if (fence) {
      const ends = new RegExp("^ {0,3}" + fence[1] + "+\\s*$");
      const taken = take((next) => !ends.test(next));
      block = { kind: "code", language: fence[2], lines: taken.slice(1), taken };
      at++; // the end, if it is there yet
    } else if (heading) {
      block = { kind: "heading", level: heading[1].length, lines: [heading[2]], taken: take(() => false) };
    } else if (ITEM.test(line)) {
      const taken = take((next) => next.trim() !== "" && !FENCE.test(next));
      block = { kind: "list", lines: taken, taken };
    } else if (/^\s*>/.test(line)) {
      const taken = take((next) => /^\s*>/.test(next));
      block = { kind: "quote", lines: taken.map((one) => one.replace(/^\s*> ?/, "")), taken };
    } else {
      const taken = take((next) => next.trim() && !FENCE.test(next) && !ITEM.test(next) && !/^#{1,6}\s/.test(next));
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
      const pre = document.createElement("pre");
      const code = document.createElement("code");
      code.textContent = block.lines.join("\n");
      if (block.language) pre.dataset.language = block.language;
      pre.tabIndex = 0; // it may scroll
      pre.append(code);
      return pre;
    }
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

function withInline(element, text) {
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    element.append(rest.slice(0, found.index));
    const [, , code, strong, italic] = found;
    const part = document.createElement(code !== undefined ? "code" : strong !== undefined ? "strong" : "em");
    part.textContent = code ?? strong ?? italic;
    element.append(part);
    rest = rest.slice(found.index + found[0].length);
  }
  element.append(rest);
  return element;
}
