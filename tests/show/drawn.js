// Runs the script of a page without a browser: a small document, and what the script has drawn as HTML.
// node drawn.js PAGE.js VALUE.json [COLUMNS WORDS]: clicks headers of the first long table, and filters its rows by words.
"use strict";
const fs = require("fs");

const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");

class Node {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, hidden: false }); }
  setAttribute(name, value) { this.attributes[name] = String(value); if (name === "value") this.value = value; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeAttribute(name) { delete this.attributes[name]; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  append(...nodes) { for (const node of nodes) { this.children = this.children.filter((child) => child !== node || typeof node === "string"); this.children.push(node); } }
  get firstChild() { return this.children[0]; }
  get textContent() { return this.children.map((child) => child.textContent ?? child).join(""); }
  set textContent(text) { this.children = [text]; }
  all(tag) { return this.children.flatMap((child) => (child instanceof Node ? [...(child.tag === tag ? [child] : []), ...child.all(tag)] : [])); }
  get html() {
    const attributes = Object.entries(this.attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`);
    const inside = this.children.map((child) => (child instanceof Node ? child.html : escaped(child))).join("");
    const end = this.tag === "input" ? "" : `${inside}</${this.tag}>`;
    return `<${this.tag}${attributes.join("")}${this.hidden ? " hidden" : ""}>${end}`;
  }
}

const [script, value, column, words] = process.argv.slice(2);
const content = new Node("div");
const stored = { content, value: { textContent: fs.readFileSync(value, "utf8") } };
global.document = {
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  getElementById: (name) => stored[name],
};
new Function(fs.readFileSync(script, "utf8"))();
if (column) {
  for (const name of column.split(",")) content.all("button").find((button) => button.textContent === name).listeners.click();
  const find = content.all("input").find((input) => input.attributes.type === "search");
  find.value = words;
  find.listeners.input();
}
process.stdout.write(content.html);
