// Draws the value of the page: tables, bars, lines and texts. A text is never read as HTML: names in it are untrusted.
"use strict";

const SVG = new Set(["svg", "path"]);
const MANY_ROWS = 12;
const MANY_COLUMNS = 4;

function el(tag, attributes, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, setting] of Object.entries(attributes ?? {})) if (setting != null) node.setAttribute(name, setting);
  node.append(...children.filter((child) => child != null && child !== ""));
  return node;
}

// A table of many columns does not fit a phone: there each row wraps, and each cell has its own head.
function tableOf(part, names, head, body) {
  const caption = el("caption", { class: "unseen" }, part.caption);
  return el("table", { class: names.length > MANY_COLUMNS ? "wide" : null }, caption, el("thead", {}, head), body);
}

function scrolled(name, ...children) {
  return el("div", { class: "scroll", role: "region", "aria-label": name, tabindex: 0 }, ...children);
}

// A cell is a text, or a number: its text and the value to sort by.
const textOf = (cell) => (Array.isArray(cell) ? cell[0] : cell);

function drawTable(part) {
  const isLong = part.rows.length > MANY_ROWS;
  const isNumber = part.columns.map((_, column) => part.rows.length > 0 && part.rows.every((row) => Array.isArray(row[column])));
  const rows = part.rows.map((cells) => {
    const nodes = cells.map((cell, column) => {
      const setting = { class: isNumber[column] ? "number" : null };
      return column ? el("td", { ...setting, "data-head": part.columns[column] }, textOf(cell)) : el("th", { ...setting, scope: "row" }, textOf(cell));
    });
    return { cells, node: el("tr", {}, ...nodes), text: cells.map(textOf).join(" ").toLowerCase() };
  });
  const body = el("tbody", {}, ...rows.map((row) => row.node));
  const heads = part.columns.map((name, column) => {
    const inside = isLong ? el("button", { type: "button", class: "sort" }, name) : name;
    return el("th", { scope: "col", class: isNumber[column] ? "number" : null }, inside);
  });
  const sort = (column) => {
    const sign = heads[column].getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const compare = isNumber[column]
      ? (a, b) => (a.cells[column][1] ?? -Infinity) - (b.cells[column][1] ?? -Infinity)
      : (a, b) => textOf(a.cells[column]).localeCompare(textOf(b.cells[column]), undefined, { numeric: true });
    rows.sort((a, b) => sign * compare(a, b) || 0); // two unknown values are equal
    body.append(...rows.map((row) => row.node));
  };
  const table = scrolled(part.caption, tableOf(part, part.columns, el("tr", {}, ...heads), body));
  if (!isLong) return table;
  heads.forEach((node, column) => node.firstChild.addEventListener("click", () => sort(column)));
  table.setAttribute("class", "scroll long");
  const find = el("input", { type: "search", placeholder: "words in a row", "aria-label": `Find rows of ${part.caption}` });
  const count = el("output", { class: "note" }, `${rows.length} rows`);
  find.addEventListener("input", () => {
    const words = find.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.node.hidden = !words.every((word) => row.text.includes(word));
    count.textContent = `${rows.filter((row) => !row.node.hidden).length} of ${rows.length} rows`;
  });
  return el("div", {}, el("p", { class: "find" }, find, " ", count), table);
}

function drawBars(part) {
  const totals = part.bars.map((bar) => bar.parts.reduce((sum, { size }) => sum + size, 0));
  const largest = Math.max(...totals) || 1;
  const limit = part.limit;
  // On the scale of a distant limit the bars would be too short to compare.
  const isNear = limit && largest > 0.3 * limit.size;
  const scale = isNear ? Math.max(largest, limit.size) : largest;
  const names = [...new Set(part.bars.flatMap((bar) => bar.parts.map(({ name }) => name)))];
  const color = (name) => `c${(names.indexOf(name) % 8) + 1}${names.indexOf(name) >= 8 ? " striped" : ""}`;
  const percent = (size, all) => `${((100 * size) / all).toFixed(1)} %`;
  const drawn = part.bars.map((bar, index) => {
    const label = bar.parts.map(({ name, text }) => `${name} ${text}`).join(", ") || "nothing";
    const areas = bar.parts.map(({ name, size, text }) => {
      const style = `width:${((100 * size) / scale).toFixed(3)}%`;
      return el("span", { class: `area ${color(name)}`, style, title: `${name}: ${text}, ${percent(size, totals[index])}` });
    });
    const end = isNear ? el("span", { class: "limit", style: `left:${((100 * limit.size) / scale).toFixed(3)}%` }) : null;
    const track = el("div", { class: "track", role: "img", "aria-label": `${bar.label}: ${label}; ${bar.text} in total` }, ...areas, end);
    return el("div", { class: "bar" }, el("span", {}, bar.label), track, el("strong", {}, bar.text));
  });
  const isSingle = part.bars.length === 1;
  const number = (tag, text, setting) => el(tag, { class: "number", ...setting }, text);
  const rows = names.map((name) => {
    const parts = part.bars.map((bar) => bar.parts.find((item) => item.name === name));
    const share = isSingle ? number("td", percent(parts[0].size, totals[0])) : null;
    const head = el("th", { scope: "row" }, el("span", { class: `swatch ${color(name)}` }), name);
    const cells = parts.map((item, index) => number("td", item ? item.text : "–", { "data-head": part.bars[index].label }));
    return el("tr", {}, head, ...cells, share);
  });
  const heads = [...part.bars.map((bar) => bar.label), ...(isSingle ? ["share"] : [])];
  const head = el("tr", {}, el("th", { scope: "col" }, "of"), ...heads.map((name) => number("th", name, { scope: "col" })));
  const legend = tableOf(part, ["of", ...heads], head, el("tbody", {}, ...rows));
  const where = isNear ? " (dashed line)" : `; the peak is ${limit ? percent(largest, limit.size) : ""} of it`;
  const note = limit ? el("p", { class: "note" }, `Memory of a device: ${limit.text}${where}.`) : null;
  return el("figure", {}, ...drawn, note, scrolled(part.caption, legend));
}

const short = (number) => (Math.abs(number) >= 1e4 ? number.toLocaleString("en", { notation: "compact" }) : `${+number.toPrecision(4)}`);

function drawLines(part) {
  const points = part.curves.flatMap((curve) => curve.points);
  const [xs, ys] = [0, 1].map((dim) => points.map((point) => point[dim]));
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const low = Math.min(...ys, ...(part.from_zero ? [0] : []));
  const high = Math.max(...ys);
  const share = (value, from, to) => (to > from ? (value - from) / (to - from) : 0.5);
  const place = ([x, y]) => `${(1000 * share(x, left, right)).toFixed(1)} ${(300 - 300 * share(y, low, high)).toFixed(1)}`;
  const grid = [0, 75, 150, 225, 300].map((y) => el("path", { class: "grid", d: `M0 ${y}H1000` }));
  const paths = part.curves.map((curve, index) => {
    const isSparse = curve.points.length < 2;
    const d = isSparse ? `M${place(curve.points[0])}h0` : `M${curve.points.map(place).join("L")}`;
    return el("path", { class: `line l${index + 1}${isSparse ? " dot" : ""}`, d });
  });
  const texts = part.curves.map(({ name, points: of }) => {
    const values = of.map((point) => point[1]);
    const [first, last] = [of[0], of[of.length - 1]];
    return `${name} from ${short(first[1])} at step ${first[0]} to ${short(last[1])} at step ${last[0]}, between ${short(Math.min(...values))} and ${short(Math.max(...values))}`;
  });
  const label = `${part.caption}: ${texts.join("; ")}`;
  const picture = el("svg", { viewBox: "0 0 1000 300", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...grid, ...paths);
  const marks = [1, 0.5, 0].map((at) => el("span", {}, short(low + at * (high - low))));
  const keys = part.curves.map(({ name }, index) => el("span", {}, el("span", { class: `swatch c${index + 1}` }), name));
  const steps = part.curves[0].points;
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": `Step of ${part.caption}` });
  const values = el("output", { class: "note" });
  const show = () => {
    const [x] = steps[slider.value];
    const near = part.curves.map(({ name, points: of }) => [name, of.find((point) => point[0] === x)]).filter(([, point]) => point);
    values.textContent = [`step ${x}`, ...near.map(([name, point]) => `${name} ${short(point[1])}`)].join(", ");
  };
  slider.addEventListener("input", show);
  show();
  const plot = el("div", { class: "plot" }, el("div", { class: "marks", "aria-hidden": "true" }, ...marks), picture);
  return el("figure", { class: "lines" }, el("figcaption", {}, el("strong", {}, part.caption), ...keys), plot, slider, values);
}

function drawText(part) {
  return scrolled(part.caption, el("pre", {}, part.text));
}

const DRAW = { table: drawTable, bars: drawBars, lines: drawLines, text: drawText };

function draw(page) {
  const links = page.blocks.map((block, index) => el("a", { href: `#section-${index + 1}` }, block.title));
  const sections = page.blocks.map((block, index) => {
    const note = block.note ? el("p", { class: "note" }, block.note) : null;
    return el("section", { id: `section-${index + 1}` }, el("h2", {}, block.title), note, ...block.parts.map((part) => DRAW[part.kind](part)));
  });
  return [
    links.length > 1 ? el("nav", { "aria-label": "On this page" }, ...links) : null,
    ...sections,
  ].filter(Boolean);
}

document.getElementById("content").append(...draw(JSON.parse(document.getElementById("value").textContent)));
