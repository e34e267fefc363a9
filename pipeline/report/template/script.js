"use strict";
// A number or term that is clicked, tapped or focused shows its definition, exact value and file. In each group one
// number can be reached with Tab, the others from there with the arrow keys.
(() => {
  const panel = document.getElementById("panel");
  const fields = Object.fromEntries(["label", "text", "value"].map((key) => [key, panel.querySelector(`.${key}`)]));
  const groups = document.querySelectorAll("table, dl, figcaption, p");

  function show(element) {
    const { term, value, path, operation } = element.dataset;
    const entry = document.getElementById(`term-${term}`);
    fields.label.replaceChildren(...entry.querySelector("dt").cloneNode(true).childNodes);
    fields.text.textContent = entry.querySelector("dd").textContent;
    const from = path === undefined ? "" : path.split(" ").map(decodeURIComponent).join(operation === "sum" ? " + " : " − ");
    fields.value.textContent = path === undefined ? "" : `${value} = ${from}`;
    panel.hidden = false;
  }

  function numbersOf(group) {
    return [...group.querySelectorAll(".n")].filter((number) => number.closest("table, dl, figcaption, p") === group);
  }

  for (const group of groups) {
    numbersOf(group).forEach((number, place) => { number.tabIndex = place === 0 ? 0 : -1; });
  }

  document.addEventListener("click", (event) => {
    const element = event.target.closest(".n, .term");
    if (element) {
      event.preventDefault();
      show(element);
    } else if (event.target.closest("#panel button") || !event.target.closest("#panel")) {
      panel.hidden = true;
    }
  });

  document.addEventListener("focusin", (event) => {
    if (event.target.matches(".n:focus-visible, .term:focus-visible")) show(event.target);
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") panel.hidden = true;
    const number = event.target;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !number.matches(".n")) return;
    const all = numbersOf(number.closest("table, dl, figcaption, p"));
    const next = all[all.indexOf(number) + step];
    if (!next) return;
    event.preventDefault();
    number.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
})();
