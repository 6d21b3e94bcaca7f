"use strict";
// Filters, sorts and shows the layouts of a plan, and looks up why another one is not the best. Figures, words and answers
// are the planner's, written into the page: nothing about a layout is computed here.
(() => {
  const data = JSON.parse(document.getElementById("plan-data").textContent);
  const element = (id) => document.getElementById(id);
  const fields = Object.keys(data.fields);
  const rows = data.answers.cells.map((_, row) => row);
  const answerOf = (row) => data.answers.texts[data.answers.cells[row]];
  const MORE = 200;
  const MOST_REASONS = 4;

  const value = (name, row) => data.fields[name].texts[data.fields[name].cells[row]];

  function make(tag, text = "", attributes = {}) {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, word] of Object.entries(attributes)) made.setAttribute(name, word);
    return made;
  }

  // What a form asks for: values by field, without those that may be anything.
  function wanted(form) {
    return Object.fromEntries([...new FormData(form)].map(([name, word]) => [name, word.trim()]).filter(([, word]) => word));
  }

  function having(asked) {
    const tests = Object.entries(asked).map(([name, word]) => [data.fields[name].cells, data.fields[name].texts.indexOf(word)]);
    return rows.filter((row) => tests.every(([cells, place]) => cells[row] === place));
  }

  // Words as on a command line, without fields that are plain.
  function nameLayout(row) {
    const words = fields.filter((name) => value(name, row) !== data.plain[name]).map((name) => `${name}=${value(name, row)}`);
    return words.join(" ") || "all on one rank";
  }

  // --- the table -------------------------------------------------------------------------------------------------------
  const table = element("layout-table").querySelector("table");
  const heads = [...table.querySelectorAll("th")];
  let sorting = { column: -1, down: false };
  let matching = rows;
  let shown = data.shown;
  let chosen = 0;

  function compare(column, down) {
    const { cells, texts } = data.columns[column];
    return (a, b) => {
      // What is unknown comes last in both directions.
      const unknown = (texts[cells[a]] === "") - (texts[cells[b]] === "");
      return unknown || (down ? cells[b] - cells[a] : cells[a] - cells[b]) || a - b;
    };
  }

  function fillTable() {
    const body = make("tbody", "", { "data-live": "" });
    const ordered = sorting.column < 0 ? matching : [...matching].sort(compare(sorting.column, sorting.down));
    for (const row of ordered.slice(0, shown)) {
      const line = make("tr", "", { "data-row": row, tabindex: 0, "aria-selected": row === chosen });
      data.columns.forEach((column, place) => {
        line.append(make("td", column.texts[column.cells[row]], { class: heads[place].className }));
      });
      body.append(line);
    }
    table.tBodies[0].replaceWith(body);
    heads.forEach((head, place) => {
      head.setAttribute("aria-sort", place !== sorting.column ? "none" : sorting.down ? "descending" : "ascending");
    });
    const fitting = matching.filter((row) => row < data.fitting).length;
    element("layout-count").textContent =
      `${matching.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} layouts, ${fitting.toLocaleString("en")} likely to fit`;
    element("more-layouts").hidden = shown >= matching.length;
  }

  function filter() {
    const { fits, ...asked } = wanted(element("filters"));
    matching = having(asked).filter((row) => !fits || (fits === "yes") === row < data.fitting);
    shown = data.shown;
    fillTable();
    drawPoints();
  }

  // --- the chart -------------------------------------------------------------------------------------------------------
  const drawing = element("trade-off").querySelector("svg");
  const cloud = drawing.querySelector(".cloud");
  const dots = [...drawing.querySelectorAll("circle")];
  const mark = document.createElementNS(drawing.namespaceURI, "circle");
  const NEAR = 25;

  function drawPoints() {
    const some = matching.filter((row) => row < data.fitting);
    cloud.setAttribute("d", some.map((row) => `M${data.across[row]} ${data.up[row]}h0`).join(""));
    const found = new Set(some);
    dots.forEach((dot, place) => dot.classList.toggle("dim", !found.has(data.dots[place])));
  }

  function choosePoint(event) {
    const box = drawing.getBoundingClientRect();
    const scale = drawing.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    let nearest = -1;
    let least = NEAR;
    const some = matching.filter((row) => row < data.fitting);
    const found = new Set(some);
    // Of points in one place the marked one is meant.
    for (const row of [...data.dots.filter((dot) => found.has(dot)), ...some]) {
      const distance = Math.hypot(data.across[row] - x, data.up[row] - y);
      if (distance < least) [nearest, least] = [row, distance];
    }
    if (nearest >= 0) choose(nearest);
  }

  // --- the chosen layout -----------------------------------------------------------------------------------------------
  function choose(row, jump = false) {
    chosen = row;
    for (const part of document.querySelectorAll(".chosen-name")) part.textContent = nameLayout(row);
    for (const part of document.querySelectorAll(".chosen-answer")) part.textContent = answerOf(row);
    for (const place of data.drawn) element(`picture-${place}`).hidden = place !== row;
    element("undrawn").hidden = data.drawn.includes(row);
    element("undrawn-fields").textContent = fields.map((name) => `${name}=${value(name, row)}`).join(" ");
    const timed = row < data.fitting;
    mark.setAttribute("visibility", timed ? "visible" : "hidden");
    mark.setAttribute("cx", timed ? data.across[row] : 0);
    mark.setAttribute("cy", timed ? data.up[row] : 0);
    for (const line of table.querySelectorAll("tbody tr")) line.setAttribute("aria-selected", Number(line.dataset.row) === row);
    if (jump) element("chosen").scrollIntoView();
  }

  // --- why not ---------------------------------------------------------------------------------------------------------
  // Positions of the choices of a rule's fields that agree with what is asked; the last field varies fastest.
  function agreeing(rule, asked) {
    let places = [0];
    for (const name of rule.fields) {
      const options = data.options[name];
      const kept = options.map((_, place) => place).filter((place) => !(name in asked) || options[place] === asked[name]);
      places = places.flatMap((before) => kept.map((place) => before * options.length + place));
    }
    return places;
  }

  // What one rule refuses of all that agrees with the question: everything, some, or nothing.
  function askRule(rule, splits, asked) {
    const degrees = rule.degrees.map((name) => data.degrees.indexOf(name));
    const keys = new Set(splits.map((split) => degrees.map((place) => split[place]).join(",")));
    const places = agreeing(rule, asked);
    const reasons = new Set();
    let allowed = false;
    for (const key of keys) {
      const block = rule.blocks[rule.splits[key]];
      if (!block) continue;
      for (const place of places) {
        if (block[place]) reasons.add(rule.reasons[block[place]]);
        else allowed = true;
      }
    }
    return { reasons: [...reasons], refuses: reasons.size > 0 && !allowed };
  }

  function explainMissing(asked) {
    const agrees = (split) => data.degrees.every((name, place) => !(name in asked) || String(split[place]) === asked[name]);
    const possible = data.splits.filter(agrees);
    if (!possible.length) return { text: data.words.no_split, reasons: [] };
    // No layout has a choice where the choice has no effect.
    const chosen = Object.keys(data.effective_with).filter((name) => name in asked && asked[name] !== data.plain[name]);
    const without = (name, split) => split[data.degrees.indexOf(data.effective_with[name])] === 1;
    const splits = possible.filter((split) => !chosen.some((name) => without(name, split)));
    if (!splits.length) {
      const moot = chosen.filter((name) => possible.every((split) => without(name, split)));
      return { text: moot.map((name) => data.words.no_effect[name]).join("; ") || data.words.no_split, reasons: [] };
    }
    const found = data.rules.map((rule) => askRule(rule, splits, asked)).filter((one) => one.refuses);
    const reasons = found.flatMap((one) => one.reasons.slice(0, MOST_REASONS)).slice(0, MOST_REASONS);
    if (reasons.length) return { text: data.words.illegal, reasons };
    const choice = Object.entries(asked).map(([name, word]) => `${name}=${word}`).join(",");
    return { text: data.words.unlisted, reasons: [`--why ${choice}`] };
  }

  function answer() {
    const asked = wanted(element("ask"));
    const box = element("answer");
    box.replaceChildren();
    if (!Object.keys(asked).length) return;
    const found = having(asked);
    if (!found.length) {
      const { text, reasons } = explainMissing(asked);
      const list = make("ul");
      list.append(...reasons.map((reason) => make("li", reason)));
      box.append(make("p", text), list);
      return;
    }
    const [row] = found;
    const others = found.length > 1 ? `the best of ${found.length.toLocaleString("en")} that have it: ` : "";
    const button = make("button", "Show this layout", { type: "button" });
    button.addEventListener("click", () => choose(row, true));
    box.append(make("p", others + nameLayout(row)), make("p", answerOf(row)), button);
  }

  // --- what a reader does ----------------------------------------------------------------------------------------------
  function press(target, action) {
    target.addEventListener("click", action);
    target.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      action(event);
    });
  }

  heads.forEach((head, column) => {
    const button = make("button", head.textContent, { type: "button" });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      sorting = { column, down: sorting.column === column && !sorting.down };
      fillTable();
    });
  });
  press(table, (event) => {
    const line = event.target.closest("tr[data-row]");
    if (line) choose(Number(line.dataset.row));
  });
  dots.forEach((dot, place) => {
    const title = dot.querySelector("title").textContent;
    for (const [name, word] of [["tabindex", 0], ["role", "button"], ["aria-label", title]]) dot.setAttribute(name, word);
    dot.addEventListener("keydown", (event) => {
      if (event.key === "Enter") choose(data.dots[place]);
    });
  });
  drawing.addEventListener("click", choosePoint);
  mark.setAttribute("class", "chosen-point");
  mark.setAttribute("r", 9);
  drawing.append(mark);
  element("trade-off").classList.add("scripted-chart");

  for (const [name, action] of [["filters", filter], ["ask", answer]]) {
    const form = element(name);
    form.addEventListener("input", action);
    form.addEventListener("submit", (event) => event.preventDefault());
    // A form is cleared only after its event.
    form.addEventListener("reset", () => setTimeout(action));
  }
  element("more-layouts").addEventListener("click", () => {
    shown += MORE;
    fillTable();
  });

  element("first-rows")?.remove();
  for (const part of document.querySelectorAll(".scripted")) part.hidden = false;
  filter();
  choose(0);
  answer();
})();
