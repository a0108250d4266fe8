// What a page does beyond showing: arrays on the mesh, values under the pointer, tables sorted and sifted.
"use strict";

function startPlacement(root) {
  const mesh = root.querySelector(".mesh");
  const sizes = mesh.dataset.mesh.split(" ").map(Number);
  const cells = [...mesh.querySelectorAll(".cell")].map((cell) => ({ cell, at: cell.dataset.at.split(" ").map(Number) }));
  const chosen = root.querySelector(".chosen");
  const arrays = [...root.querySelectorAll(".array")];

  // The shard that a device holds: its index along the axes of each dim, the first axis slowest.
  const show = (array) => {
    root.querySelectorAll(".is-chosen").forEach((one) => one.classList.remove("is-chosen"));
    array.classList.add("is-chosen");
    const axes = array.dataset.by.split(/[|+]/).filter(Boolean).map(Number);
    const parts = axes.reduce((product, axis) => product * sizes[axis], 1);
    for (const { cell, at } of cells) {
      const part = axes.reduce((number, axis) => number * sizes[axis] + at[axis], 0);
      // The colors of style.css, then hues with a large distance.
      cell.className = `cell held ${parts <= 8 ? `c${part + 1}` : "many"}`;
      cell.style.setProperty("--hue", (part * 137.5) % 360);
      cell.querySelector("i").textContent = parts > 1 ? `shard ${part}` : "full";
    }
    const title = array.querySelector("summary code").cloneNode(true);
    chosen.replaceChildren(title, array.querySelector(".facts").cloneNode(true));
  };
  for (const array of arrays) {
    array.addEventListener("pointerenter", () => show(array));
    array.addEventListener("focusin", () => show(array));
  }
  root.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const here = event.target.closest("summary");
    if (!step || !here) return;
    const shown = [...root.querySelectorAll("summary")].filter((one) => one.offsetParent);
    const next = shown[shown.indexOf(here) + step];
    if (next) { event.preventDefault(); next.focus(); }
  });
  const find = document.createElement("input");
  Object.assign(find, { type: "search", className: "find", placeholder: "Find an array by its path" });
  find.setAttribute("aria-label", "Find an array by its path");
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase();
    for (const array of arrays) array.hidden = !array.querySelector("code").textContent.toLowerCase().includes(wanted);
    if (wanted) root.querySelectorAll(".kind").forEach((kind) => { kind.open = true; });
  });
  root.querySelector(".arrays").prepend(find);
  if (arrays.length) show(arrays[0]);
}

function startCurves(plot) {
  const curves = JSON.parse(plot.dataset.curves);
  const [left, right] = JSON.parse(plot.dataset.x);
  const points = curves[0][1];
  const cursor = Object.assign(document.createElement("span"), { className: "cursor", hidden: true });
  const tip = Object.assign(document.createElement("span"), { className: "tip", hidden: true });
  plot.append(cursor, tip);
  let at = -1;
  const hide = () => { cursor.hidden = tip.hidden = true; };
  const show = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const x = points[at][0];
    const share = (x - left) / (right - left);
    const near = curves.map(([name, of]) => [name, of.find((point) => point[0] === x)]).filter(([, point]) => point);
    tip.textContent = [`step ${x}`, ...near.map(([name, point]) => `${name} ${point[2]}`)].join("\n");
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${100 * share}%`;
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 8px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 8px)`;
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const x = left + (right - left) * (event.clientX - box.left) / box.width;
    let best = 0;
    points.forEach((point, index) => { if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = index; });
    show(best);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("focus", () => show(at < 0 ? points.length - 1 : at));
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { event.preventDefault(); show(at + step); }
  });
}

function startSorting(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = head.querySelector(".sort");
    if (!button) return;
    button.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        const value = cell.querySelector("[data-value]")?.dataset.value;
        return value === undefined ? cell.textContent : Number(value);
      };
      const order = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
      body.append(...[...body.rows].sort((a, b) => way * order(key(a), key(b))));
    });
  });
}

function startSifting(root) {
  const form = root.querySelector(".sift");
  const rows = [...root.querySelectorAll("tbody tr")];
  const sift = () => {
    let shown = 0;
    for (const row of rows) {
      const is = [...form.elements].every((field) => {
        if (field.name === "family") return !field.value || row.dataset.family === field.value;
        if (field.name === "fits") return !field.checked || row.dataset.fits === "yes";
        if (field.name.startsWith("axis-")) return !field.value || (row.getAttribute(`data-${field.name}`) ?? "1") === field.value;
        return true;
      });
      row.hidden = !is;
      shown += is;
    }
    form.querySelector("output").textContent = `${shown} of ${rows.length} shown`;
  };
  form.hidden = false;
  form.addEventListener("change", sift);
  form.addEventListener("submit", (event) => event.preventDefault());
  sift();
}

document.querySelectorAll(".placement").forEach(startPlacement);
document.querySelectorAll(".plot").forEach(startCurves);
document.querySelectorAll(".sortable").forEach(startSorting);
document.querySelectorAll(".ranked").forEach(startSifting);
