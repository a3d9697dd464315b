"use strict";
(() => {
  const { runs, frontiers } = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const colours = ["--accent", "--second", "--third", "--fourth", "--fifth", "--sixth", "--seventh"];
  const dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  const styles = ["circle", "rect", "triangle", "star", "cross"];
  const state = { run: 0, layer: 0 };
  const charts = {};

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => Number(value.toPrecision(3)).toString();
  const grouped = (value) => value.toLocaleString("en");
  const points = ({ count, values }) =>
    values.map((y, step) => ({ x: 1 + Math.floor((step * (count - 1)) / Math.max(1, values.length - 1)), y }));

  /* The labels of a legend with the dashes of the lines, which Chart.js leaves out where a line stands for a box. */
  const generateLabels = (chart) =>
    Chart.defaults.plugins.legend.labels
      .generateLabels(chart)
      .map((item) => ({ ...item, lineDash: chart.data.datasets[item.datasetIndex].borderDash }));

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
          x: axis(x, { scale: type === "bar" ? { stacked: true, grid: { display: false } } : { type: "linear", min: last && 1, max: last, ...rest.across }, ticks: type === "bar" ? {} : whole }),
          y: axis(y, {
            scale: { type: log ? "logarithmic" : "linear", stacked: type === "bar", beginAtZero: !rest.error, ...rest.upwards?.(log) },
            ticks: rest.error ? { callback: (value) => Number(value.toPrecision(6)).toString(), maxTicksLimit: 6, includeBounds: !rest.upwards } : {},
          }),
          ...rest.scales?.(axis),
        },
        plugins: {
          legend: {
            display: datasets.length > 1 && !rest.plugins,
            labels: { color: colour("--ink"), ...(type === "bar" ? { boxWidth: 14, boxHeight: 8 } : { usePointStyle: true, pointStyle: "line", pointStyleWidth: 28, generateLabels }) },
          },
          tooltip: rest.tooltip ?? {},
        },
        onClick: rest.onClick,
      },
      plugins: rest.plugins ?? [],
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
        ? "the method's own objective, relative and damped, measured or estimated"
        : "this method measures its objective once, at the end";
    draw("history", "line", [line("objective", points(layer.history))], { x: layer.step, y: "relative objective", error: true, last: Math.max(2, layer.history.count) });
    byId("spectrum-note").textContent = layer.rank
      ? `the ${layer.ninety} largest of ${layer.rank} hold 90 % of the sum of their squares`
      : "rank 0: this layer has no low-rank part";
    draw("spectrum", "line", [line("singular value", points(layer.spectrum))], { x: "singular value, the largest first", y: "value", last: Math.max(2, layer.rank) });
  }

  function drawParameters() {
    const run = runs[state.run];
    const bar = (label, data, name) => ({ label, data, backgroundColor: colour(name), borderWidth: 0, barPercentage: 1, categoryPercentage: 0.9 });
    const rank = { ...line("rank of L (right)", run.layers.map((layer) => layer.rank), 2), type: "line", yAxisID: "rank", showLine: false, pointRadius: 2, order: -1, borderColor: colour("--ink"), backgroundColor: colour("--ink") };
    draw("parameters", "bar", [bar("non-zeros of S", run.sparse, "--accent"), bar("entries of the factors of L", run.lowRank, "--second"), rank], {
      x: "layer, in the order of the model",
      y: "% of the dense weight",
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

  function drawSensitivities() {
    const id = `sensitivity-${state.run}`;
    if (byId(id)) {
      draw(id, "line", runs[state.run].sensitivities.map(({ kind, data }, index) => ({ ...line(kind, data.filter(({ y }) => y > 0), index), pointRadius: 2, clip: 8 })), {
        x: "block", y: "nats per token", error: true,
      });
    }
  }

  const cut = (name, most) => (name.length > most ? `${name.slice(0, most / 2 - 1)}…${name.slice(-most / 2)}` : name);
  const apart = (one, other) =>
    one.x + one.w <= other.x || other.x + other.w <= one.x || one.y + one.h <= other.y || other.y + other.h <= one.y;

  /* The free place for a box that is nearest to a point, the one to its right first. */
  function placed(point, w, h, area, taken) {
    const places = [
      { x: point.x + 9, y: point.y - h / 2 }, { x: point.x - 9 - w, y: point.y - h / 2 },
      { x: point.x - w / 2, y: point.y - 9 - h }, { x: point.x - w / 2, y: point.y + 9 },
    ];
    for (let y = area.top; y + h <= area.bottom; y += 4) {
      for (let x = area.left; x + w <= area.right; x += 6) places.push({ x, y });
    }
    const distance = ({ x, y }) =>
      Math.hypot(Math.max(x - point.x, 0, point.x - x - w), Math.max(y - point.y, 0, point.y - y - h));
    return places
      .map((place) => ({ ...place, w, h, away: distance(place) }))
      .filter((box) => box.x >= area.left && box.x + w <= area.right && box.y >= area.top && box.y + h <= area.bottom)
      .filter((box) => taken.every((other) => apart(box, other)))
      .reduce((best, box) => (best && best.away <= box.away ? best : box), undefined);
  }

  /* Writes the name of each dataset beside its only point; a line leads to a name that is farther away. */
  const names = {
    id: "names",
    afterDatasetsDraw(chart) {
      const { ctx, chartArea } = chart;
      const points = chart.data.datasets.map((_, index) => chart.getDatasetMeta(index).data[0]);
      const taken = points.map(({ x, y }) => ({ x: x - 7, y: y - 7, w: 14, h: 14 }));
      ctx.save();
      Object.assign(ctx, { font: `12px ${Chart.defaults.font.family}`, textBaseline: "middle", lineWidth: 1 });
      Object.assign(ctx, { fillStyle: colour("--ink"), strokeStyle: colour("--soft") });
      chart.names = chart.data.datasets.flatMap(({ label }, index) => {
        const text = cut(label, chartArea.width < 400 ? 16 : 24);
        const box = placed(points[index], ctx.measureText(text).width, 15, chartArea, taken);
        if (!box) return [];
        taken.push(box);
        ctx.fillText(text, box.x, box.y + box.h / 2);
        if (box.away > 12) {
          const { x, y } = points[index];
          ctx.beginPath();
          ctx.moveTo(x, y);
          ctx.lineTo(Math.min(Math.max(x, box.x), box.x + box.w), y < box.y ? box.y : box.y + box.h);
          ctx.stroke();
        }
        return [{ text, ...box }];
      });
      ctx.restore();
    },
  };

  function drawFrontiers() {
    frontiers.forEach((points, index) => {
      const most = Math.max(...points.map(({ bytes }) => bytes));
      const [unit, word] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [0, "bytes"]].find(([size]) => most >= 2 * size);
      const wider = (values) => {
        const [least, largest] = [Math.min(...values), Math.max(...values)];
        const rest = 0.15 * (largest - least || largest);
        return { min: Math.max(0, least - rest), max: largest + rest };
      };
      const datasets = points.map(({ name, bytes, perplexity, run }) => ({
        ...line(name, [{ x: bytes / unit, y: perplexity }], run ?? 0),
        ...(run === null && { borderColor: colour("--ink"), backgroundColor: colour("--ink") }),
        pointStyle: run === null ? "rectRot" : styles[Math.floor(run / colours.length) % styles.length],
        pointRadius: 6,
        pointHoverRadius: 8,
        clip: 8,
      }));
      const heights = points.map(({ perplexity }) => perplexity);
      draw(`frontier-${index}`, "line", datasets, {
        x: `weights, ${word}`,
        y: "perplexity",
        error: true,
        across: wider(points.map(({ bytes }) => bytes / unit)),
        upwards: (log) => (log ? { min: Number((Math.min(...heights) / 1.4).toPrecision(2)), max: Math.max(...heights) * 1.4 } : wider(heights)),
        plugins: [names],
      });
    });
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
      "error before the cast": short(layer.before),
      ...(layer.sensitivity !== null && { sensitivity: short(layer.sensitivity) }),
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
    drawSensitivities();
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
  const redraw = () => { drawLayer(); drawParameters(); drawBlocks(); drawSensitivities(); drawFrontiers(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  for (const button of document.querySelectorAll("#map button")) {
    button.title = button.getAttribute("aria-label");
  }
  const worst = layers().reduce((best, layer, index) => (layer.error > layers()[best].error ? index : best), 0);
  choose(worst);
  drawParameters();
  drawBlocks();
  drawSensitivities();
  drawFrontiers();
})();
