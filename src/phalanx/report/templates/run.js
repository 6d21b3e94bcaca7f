"use strict";
// Reads out the figures under the pointer (or the arrow keys) in every chart at once. The axis choices need no script.
(() => {
  const data = JSON.parse(document.getElementById("run-data").textContent);
  const columns = Object.fromEntries(Object.entries(data.columns).map(([name, text]) => [name, text.split("|")]));
  const outputs = [...document.querySelectorAll("[data-column]")];
  const plots = [...document.querySelectorAll(".plot")];
  const last = data.positions.step.length - 1;
  let shown = null;

  const axis = () => document.querySelector("input[name=axis]:checked").value;

  function show(row) {
    shown = row;
    const [low, high] = data.domains[axis()];
    for (const output of outputs) output.textContent = columns[output.dataset.column][row ?? last];
    for (const plot of plots) {
      const cursor = plot.querySelector(".cursor");
      cursor.hidden = row === null;
      if (row !== null) cursor.style.left = `${(100 * (data.positions[axis()][row] - low)) / (high - low)}%`;
    }
  }

  function nearestRow(share) {
    const [low, high] = data.domains[axis()];
    const positions = data.positions[axis()];
    const wanted = low + share * (high - low);
    let left = 0, right = last;
    while (left < right) {
      const middle = (left + right) >> 1;
      if (positions[middle] < wanted) left = middle + 1;
      else right = middle;
    }
    return left > 0 && wanted - positions[left - 1] < positions[left] - wanted ? left - 1 : left;
  }

  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25, Home: -Infinity, End: Infinity };
  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      show(nearestRow((event.clientX - box.left) / box.width));
    });
    plot.addEventListener("pointerleave", () => show(null));
    plot.addEventListener("blur", () => show(null));
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return show(null);
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(Math.min(last, Math.max(0, (shown ?? last) + moves[event.key])));
    });
  }
  for (const choice of document.querySelectorAll("input[name=axis]")) choice.addEventListener("change", () => show(shown));
})();
