"use strict";
(() => {
  const { config, charts } = JSON.parse(document.getElementById("data").textContent);
  const options = { config, actions: false, ast: true, defaultStyle: false, renderer: "svg" };
  const runs = [...document.querySelectorAll(".of-run")].filter((run) => run.querySelector("select"));

  /* Draw the charts that are visible for the first time, and fit all of them to the width of the page. */
  function draw() {
    for (const [id, spec] of Object.entries(charts)) {
      const element = document.getElementById(id);
      if (element.offsetWidth) {
        element.view ??= vegaEmbed(element, spec, options).then(({ view }) =>
          view.addEventListener("click", (event, item) => item?.datum?.layer && choose(item.datum.layer)),
        );
      }
    }
    window.dispatchEvent(new Event("resize"));
  }

  /* Show a layer in each folder that has it: mark its cell, list the values of its row, and draw its curves. */
  function choose(name) {
    for (const run of runs) {
      const row = [...run.querySelectorAll("tr[data-layer]")].find(({ dataset }) => dataset.layer === name);
      if (!row) continue;
      run.querySelector("select").value = name;
      const titles = row.closest("table").tHead.rows[0].cells;
      const facts = [...row.cells].slice(1).filter(({ textContent }) => textContent);
      run.querySelector(".facts").replaceChildren(
        ...facts.map((cell) => {
          const group = document.createElement("div");
          for (const [tag, { textContent }] of [["dt", titles[cell.cellIndex]], ["dd", cell]]) {
            group.appendChild(Object.assign(document.createElement(tag), { textContent }));
          }
          return group;
        }),
      );
      for (const element of run.querySelectorAll(".canvas")) {
        const [layer] = charts[element.id].params ?? [];
        if (!layer) continue;
        layer.value = name;
        element.view?.then((view) => view.signal("layer", name).runAsync());
      }
    }
  }

  document.getElementById("choice")?.addEventListener("change", ({ target }) => {
    for (const part of document.querySelectorAll(".of-run")) part.hidden = part.dataset.run !== target.value;
    draw();
  });
  for (const run of runs) {
    const select = run.querySelector("select");
    select.addEventListener("change", () => choose(select.value));
    choose(select.value);
  }
  for (const copy of document.querySelectorAll(".copy")) {
    copy.addEventListener("click", async () => {
      const code = copy.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        copy.textContent = "Selected: press Ctrl-C";
      }
    });
  }
  draw();
})();
