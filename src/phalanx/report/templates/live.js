"use strict";
// Asks the server whether the logs have changed and loads the page anew if so. What the reader chose and opened stays, and
// nothing is loaded while somebody reads values off a chart or has text selected.
(() => {
  const said = document.getElementById("live");
  const follows = said.textContent;
  const name = (one) => one.id || one.closest("[id]")?.id || one.textContent.trim().slice(0, 8);
  const state = (one) => (one.tagName === "DETAILS" ? "open" : "checked");
  const choices = () => [...document.querySelectorAll("input, details")];
  let moved = 0;
  for (const act of ["pointermove", "keydown"]) addEventListener(act, () => (moved = Date.now()));
  const reads = () => document.querySelector(".plot:hover, .plot:focus") && Date.now() - moved < 10000;
  const busy = () => reads() || !getSelection().isCollapsed;

  const kept = JSON.parse(sessionStorage.getItem("choices") ?? "{}");
  for (const one of choices()) if (name(one) in kept) one[state(one)] = kept[name(one)];

  async function look() {
    try {
      const answer = await fetch("stamp", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const changed = (await answer.text()) !== said.dataset.stamp;
      said.textContent = follows;
      if (changed && !busy()) {
        sessionStorage.setItem("choices", JSON.stringify(Object.fromEntries(choices().map((one) => [name(one), one[state(one)]]))));
        location.reload();
        return;
      }
    } catch {
      said.textContent = said.dataset.gone;
    }
    setTimeout(look, 3000);
  }
  setTimeout(look, 3000);
})();
