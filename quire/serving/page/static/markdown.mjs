// A small Markdown: paragraphs, headings, lists, quotes, tables, code, emphasis, links. Everything becomes text nodes.

import { copyButton, h } from "./dom.mjs";

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^*\n]+?)\*\*|\*([^*\s][^*\n]*?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

function inline(text) {
  const nodes = [];
  for (let rest = text; rest; ) {
    const found = INLINE.exec(rest);
    if (!found) {
      nodes.push(rest);
      break;
    }
    if (found.index) nodes.push(rest.slice(0, found.index));
    const [whole, , code, strong, em, label, href] = found;
    if (code !== undefined) nodes.push(h("code", {}, code.trim() || code));
    else if (strong !== undefined) nodes.push(h("strong", {}, ...inline(strong)));
    else if (em !== undefined) nodes.push(h("em", {}, ...inline(em)));
    else nodes.push(h("a", { href, rel: "noreferrer noopener", target: "_blank" }, label));
    rest = rest.slice(found.index + whole.length);
  }
  return nodes;
}

function codeBlock(language, lines) {
  const text = lines.join("\n");
  const bar = h("div", { class: "code-bar" }, h("span", {}, language || "code"), copyButton(() => text));
  return h("div", { class: "code" }, bar, h("pre", { tabindex: "0", "aria-label": "Code" }, h("code", {}, text)));
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(head, rows) {
  const row = (tag, line) => h("tr", {}, cells(line).map((cell) => h(tag, tag === "th" ? { scope: "col" } : {}, ...inline(cell))));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, rows.map((line) => row("td", line)))));
}

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?[\s:|-]*-[\s:|-]*\|[\s:|-]*$/;
const starts = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || RULE.test(line) || /^\s*>/.test(line);

// Each reader takes lines from `at` on and returns [node, the next line], or null where it does not apply.
function readFence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(found[1])) end += 1;
  return [codeBlock(found[2], lines.slice(at + 1, end)), end + 1];
}

function readHeading(lines, at) {
  const found = HEADING.exec(lines[at]);
  // Inside a message, so below the page's own headings.
  return found && [h(`h${Math.min(found[1].length + 3, 6)}`, {}, ...inline(found[2])), at + 1];
}

function readQuote(lines, at) {
  let end = at;
  while (end < lines.length && /^\s*>/.test(lines[end])) end += 1;
  if (end === at) return null;
  return [h("blockquote", {}, ...blocks(lines.slice(at, end).map((line) => line.replace(/^\s*>\s?/, "")))), end];
}

function readList(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let next = at;
  for (let found = first; next < lines.length; found = ITEM.exec(lines[next] ?? "")) {
    if (found && found[1].length <= indent) {
      if (/\d/.test(found[2]) !== isOrdered || found[1].length < indent) break;
      items.push([found[3]]);
    } else if (lines[next].trim() && (found || /^\s{2,}/.test(lines[next]))) {
      items.at(-1).push(lines[next].slice(Math.min(indent + 2, lines[next].search(/\S/))));
    } else break;
    next += 1;
  }
  const list = items.map(([text, ...more]) => h("li", {}, ...inline(text), ...blocks(more)));
  return [h(isOrdered ? "ol" : "ul", isOrdered ? { start: Number.parseInt(first[2], 10) } : {}, list), next];
}

function readTable(lines, at) {
  if (!lines[at].includes("|") || !TABLE_RULE.test(lines[at + 1] ?? "")) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return [table(lines[at], lines.slice(at + 2, end)), end];
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  const nodes = lines.slice(at, end).flatMap((line, index) => (index ? [h("br"), ...inline(line)] : inline(line)));
  return [h("p", {}, ...nodes), end];
}

const READERS = [
  readFence,
  readHeading,
  (lines, at) => (RULE.test(lines[at]) ? [h("hr"), at + 1] : null),
  readQuote,
  readList,
  readTable,
  readParagraph,
];

function blocks(lines) {
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    let found = null;
    for (const reader of READERS) {
      found = reader(lines, at);
      if (found) break;
    }
    nodes.push(found[0]);
    at = found[1];
  }
  return nodes;
}

export const markdown = (text) => blocks(text.split("\n"));
