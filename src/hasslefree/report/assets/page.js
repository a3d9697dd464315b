"use strict";
(() => {
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const colours = ["--accent", "--second", "--third", "--fourth", "--fifth"];
  const dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  const state = { run: 0, layer: 0 };
  const charts = {};

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => Number(value.toPrecision(3)).toString();
  const grouped = (value) => value.toLocaleString("en");
  const points = ({ count, values }) =>
    values.map((y, step) => ({ x: 1 + Math.floor((step * (count - 1)) / Math.max(1, values.length - 1)), y }));

  /* One chart in the place of the one before. The colours are those of the scheme in force. */
  function draw(id, type, datasets, { x, y, labels, last, ...rest }) {
    charts[id]?.destroy();
    // Less than a decade is best seen on a plain scale that need not begin at 0.
    const heights = rest.error ? datasets.flatMap(({ data }) => data.map((point) => point.y)) : [];
    const log = Math.max(...heights) > 10 * Math.min(...heights);
    const axis = (text, more) => ({
      title: { display: true, text, color: colour("--soft") },
      ticks: { color: colour("--soft"), maxRotation: 0, autoSkipPadding: 12, ...more?.ticks },
      grid: { color: colour("--line") },
      border: { color: colour("--line") },
      ...more?.scale,
    });
    const whole = { precision: 0, includeBounds: false };
    charts[id] = new Chart(byId(id), {
      type,
      data: { labels, datasets },
      options: {
        animation: false,
        maintainAspectRatio: false,
        normalized: true,
        interaction: { mode: "nearest", axis: "x", intersect: false },
        scales: {
          x: axis(x, { scale: type === "bar" ? { stacked: true, grid: { display: false } } : { type: "linear", min: last && 1, max: last }, ticks: type === "bar" ? {} : whole }),
          y: axis(y, {
            scale: { type: log ? "logarithmic" : "linear", stacked: type === "bar", beginAtZero: !rest.error },
            ticks: rest.error ? { callback: (value) => Number(value.toPrecision(6)).toString(), maxTicksLimit: 6 } : {},
          }),
          ...rest.scales?.(axis),
        },
        plugins: {
          legend: { display: datasets.length > 1, labels: { color: colour("--ink"), boxWidth: 14, boxHeight: 8 } },
          tooltip: rest.tooltip ?? {},
        },
        onClick: rest.onClick,
      },
    });
  }

  const line = (label, data, index = 0) => ({
    label,
    data,
    borderColor: colour(colours[index % colours.length]),
    backgroundColor: colour(colours[index % colours.length]),
    borderDash: dashes[Math.floor(index / colours.length) % dashes.length],
    borderWidth: 2,
    pointRadius: data.length > 40 ? 0 : 3,
    pointHoverRadius: 5,
  });

  const layers = () => runs[state.run].layers;
  const chosen = () => layers()[state.layer];

  function drawLayer() {
    const layer = chosen();
    byId("history-note").textContent =
      layer.history.count > 1
        ? "the method's own objective, relative and damped"
        : "this method measures it once, at its end";
    draw("history", "line", [line("objective", points(layer.history))], { x: layer.step, y: "relative objective", error: true, last: Math.max(2, layer.history.count) });
    byId("spectrum-note").textContent = layer.rank
      ? `the largest ${layer.ninety} of ${layer.rank} singular values hold 90 % of ‖L‖²`
      : "rank 0: there is no low-rank part";
    draw("spectrum", "line", [line("singular value", points(layer.spectrum))], { x: "singular value of L", y: "size", last: Math.max(2, layer.rank) });
  }

  function drawParameters() {
    const run = runs[state.run];
    const bar = (label, data, name) => ({ label, data, backgroundColor: colour(name), borderWidth: 0, barPercentage: 1, categoryPercentage: 0.9 });
    const rank = { ...line("rank (right)", run.layers.map((layer) => layer.rank), 2), type: "line", yAxisID: "rank", pointRadius: 0, stepped: "middle", order: -1 };
    draw("parameters", "bar", [bar("non-zeros of S", run.sparse, "--accent"), bar("factors of L", run.lowRank, "--second"), rank], {
      x: "layer, in the order of the model",
      y: "% of out × in",
      labels: run.layers.map((layer) => `${layer.block} ${layer.kind}`),
      scales: (axis) => ({
        rank: axis("rank", { scale: { position: "right", beginAtZero: true, grid: { display: false } }, ticks: { precision: 0 } }),
      }),
      onClick: (event, found) => found.length && choose(found[0].index),
    });
  }

  function drawBlocks() {
    if (byId("blocks")) {
      draw("blocks", "line", runs.map((run, index) => line(run.name, run.blocks.filter(({ y }) => y > 0), index)), {
        x: "block", y: "mean relative error", error: true,
      });
    }
  }

  const map = () => document.querySelector(`#map .of-run[data-run="${state.run}"]`);
  const buttons = () => [...map().querySelectorAll("button")];
  const indexOf = (button) => layers().findIndex((layer) => layer.name === button.dataset.layer);

  function choose(index) {
    state.layer = index;
    const layer = chosen();
    for (const button of buttons()) {
      const here = button.dataset.layer === layer.name;
      button.setAttribute("aria-pressed", here);
      button.tabIndex = here ? 0 : -1;
    }
    byId("layer-name").textContent = layer.name;
    const facts = {
      "relative error": short(layer.error),
      "before the cast": short(layer.before),
      "out × in": layer.shape.join(" × "),
      pattern: layer.pattern,
      "non-zeros of S": grouped(layer.nonzeros),
      "rank of L": grouped(layer.rank),
    };
    byId("layer-facts").replaceChildren(
      ...Object.entries(facts).map(([name, value]) => {
        const group = document.createElement("div");
        for (const [tag, text] of [["dt", name], ["dd", value]]) {
          group.appendChild(document.createElement(tag)).textContent = text;
        }
        return group;
      }),
    );
    byId("layer-remarks").replaceChildren(
      ...layer.remarks.map((remark) => Object.assign(document.createElement("li"), { textContent: remark })),
    );
    drawLayer();
  }

  /* Where an arrow leads from a cell: to the next one in that direction that has a layer. */
  function neighbour(button, key) {
    const cell = button.closest("td");
    const row = cell.parentElement;
    const across = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const down = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[key];
    if (across) {
      const inRow = [...row.querySelectorAll("button")];
      return inRow[inRow.indexOf(button) + across];
    }
    if (down) {
      for (let next = row[down]; next; next = next[down]) {
        const found = next.cells[cell.cellIndex].querySelector("button");
        if (found) return found;
      }
    }
    return { Home: buttons()[0], End: buttons().at(-1) }[key];
  }

  function show(run) {
    const name = chosen().name;
    state.run = run;
    for (const part of document.querySelectorAll(".of-run")) {
      part.hidden = Number(part.dataset.run) !== run;
    }
    choose(Math.max(0, layers().findIndex((layer) => layer.name === name)));
    drawParameters();
  }

  byId("map").addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button) choose(indexOf(button));
  });
  byId("map").addEventListener("keydown", (event) => {
    const button = event.target.closest("button");
    const next = button && neighbour(button, event.key);
    if (next) {
      event.preventDefault();
      choose(indexOf(next));
      next.focus();
    }
  });
  byId("choice")?.addEventListener("change", ({ target }) => show(Number(target.value)));
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
  const redraw = () => { drawLayer(); drawParameters(); drawBlocks(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  for (const button of document.querySelectorAll("#map button")) {
    button.title = button.getAttribute("aria-label");
  }
  const worst = layers().reduce((best, layer, index) => (layer.error > layers()[best].error ? index : best), 0);
  choose(worst);
  drawParameters();
  drawBlocks();
})();
