"use strict";
// Draws the frontier's charts from the page's data, and shows the configuration behind a point.
(() => {
  const model = JSON.parse(document.getElementById("model").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const hidden = new Set();
  const EPSILON = 0, ACCURACY = 2, COVERAGE = 3;
  const config = { displayModeBar: false, responsive: true, displaylogo: false };
  root.dataset.errors = "0";
  addEventListener("error", () => { root.dataset.errors = String(Number(root.dataset.errors) + 1); });

  const color = name => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);

  // Coverage: dark is much on a light page, light is much on a dark one.
  function stops() {
    return dark.matches ? model.cividis.slice(2) : [...model.cividis].reverse().slice(1);
  }

  function hue(coverage) {
    const [low, high] = model.coverage;
    const scale = stops();
    const place = Math.min(Math.max((coverage - low) / (high - low), 0), 1) * (scale.length - 1);
    const index = Math.min(Math.floor(place), scale.length - 2);
    const parts = [1, 3, 5].map(at => {
      const [from, to] = [scale[index], scale[index + 1]].map(hex => parseInt(hex.slice(at, at + 2), 16));
      return Math.round(from + (to - from) * (place - index));
    });
    return `rgb(${parts.join(",")})`;
  }

  function visible(panel, onlyFrontier) {
    return panel.points
      .map((index, rank) => ({ index, rank, ...model.points[index] }))
      .filter(point => !hidden.has(point.series) && (point.front || !onlyFrontier));
  }

  const coordinate = (panel, point, objective) =>
    objective === EPSILON ? panel.positions[point.rank] : point.values[objective];

  const hover = point =>
    `<b>${escaped(model.series[point.series].name)}</b><br>ε ${point.words[0]}<br>${model.titles[1]} ${point.words[1]}` +
    `<br>accuracy ${point.words[2]}<br>coverage ${point.words[3]}` +
    point.degenerate.map(words => `<br>${escaped(words)}`).join("") + "<extra></extra>";

  function axis(panel, objective) {
    const common = {
      title: { text: model.titles[objective], font: { size: 13, color: color("muted") } },
      tickfont: { size: 12, color: color("muted") }, gridcolor: color("line"), linecolor: color("muted"),
      zeroline: false, showline: true, fixedrange: coarse, automargin: true,
    };
    if (objective === EPSILON) {
      return { ...common, range: panel.range, tickvals: panel.ticks.map(t => t[0]), ticktext: panel.ticks.map(t => t[1]) };
    }
    return objective >= ACCURACY ? { ...common, tickformat: ".3~%" } : { ...common, rangemode: "tozero" };
  }

  function layout(more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, color: color("ink"), size: 12 },
      hoverlabel: { bgcolor: color("paper"), bordercolor: color("muted"), font: { color: color("ink"), size: 13 }, align: "left" },
      margin: { l: 52, r: 12, t: 8, b: 44 }, hovermode: "closest", dragmode: coarse ? false : "zoom", ...more,
    };
  }

  function grouped(points) {
    const groups = new Map();
    for (const point of points) groups.set(point.series, [...(groups.get(point.series) || []), point]);
    return [...groups].sort((a, b) => a[0] - b[0]);
  }

  // ---- planes: size is accuracy, hue is coverage, shape is the method
  function drawPlane(holder) {
    const panel = model.panels[holder.dataset.panel];
    const [across, up] = holder.dataset.axes.split(",").map(Number);
    const points = visible(panel, holder.dataset.only === "1");
    const traces = grouped(points).map(([series, members]) => ({
      type: "scatter", mode: "markers", name: model.series[series].name,
      x: members.map(p => coordinate(panel, p, across)), y: members.map(p => coordinate(panel, p, up)),
      customdata: members.map(p => p.index), hovertemplate: members.map(hover),
      marker: {
        symbol: model.series[series].symbol, size: members.map(p => panel.sizes[p.rank]),
        color: members.map(p => hue(p.values[COVERAGE])), opacity: members.map(p => (p.front ? 0.95 : 0.35)),
        line: { width: members.map(p => (model.series[series].symbol.endsWith("-open") ? 2 : p.front ? 1 : 0.5)),
                color: model.series[series].symbol.endsWith("-open") ? members.map(p => hue(p.values[COVERAGE])) : color("ink") },
      },
    }));
    const crossed = points.filter(point => point.degenerate.length);
    if (crossed.length) {
      traces.push({ type: "scatter", mode: "markers", hoverinfo: "skip",
        x: crossed.map(p => coordinate(panel, p, across)), y: crossed.map(p => coordinate(panel, p, up)),
        marker: { symbol: "x-thin", size: crossed.map(p => panel.sizes[p.rank] + 8), line: { width: 1.5, color: color("ink") } } });
    }
    return draw(holder, traces, layout({ xaxis: axis(panel, across), yaxis: axis(panel, up) }));
  }

  // ---- space: every mark is a character, so that all shapes exist
  function drawSpace(holder) {
    const panel = model.panels[holder.dataset.panel];
    const points = visible(panel, holder.dataset.only === "1");
    const traces = grouped(points).map(([series, members]) => ({
      type: "scatter3d", mode: "text", name: model.series[series].name,
      x: members.map(p => coordinate(panel, p, EPSILON)), y: members.map(p => p.values[1]), z: members.map(p => p.values[ACCURACY]),
      text: members.map(() => model.series[series].glyph), customdata: members.map(p => p.index),
      hovertemplate: members.map(hover),
      textfont: { color: members.map(p => hue(p.values[COVERAGE])), size: members.map(p => (p.front ? 15 : 8)) },
    }));
    const side = objective => {
      const { fixedrange, automargin, rangemode, ...rest } = axis(panel, objective);
      return { ...rest, showspikes: false, backgroundcolor: "rgba(0,0,0,0)", gridcolor: color("line"), tickfont: { size: 11, color: color("muted") } };
    };
    const narrow = holder.clientWidth < 480;
    return draw(holder, traces, layout({
      margin: { l: 0, r: 0, t: 0, b: 0 }, dragmode: "turntable",
      scene: {
        xaxis: { ...side(EPSILON), title: { text: "ε", font: { size: 15, color: color("muted") } } }, yaxis: { ...side(1), autorange: "reversed" }, zaxis: side(ACCURACY), aspectmode: "manual",
        aspectratio: { x: 1.2, y: 1.1, z: 0.8 },
        camera: { eye: narrow ? { x: 2.15, y: 2.25, z: 1.1 } : { x: 1.2, y: 1.4, z: 0.65 }, center: { x: 0, y: 0, z: -0.2 } },
      },
    }));
  }

  // ---- attainment: medians of all methods; best to worst of the chosen one
  function drawAttainment(holder) {
    const panel = model.panels[holder.dataset.panel];
    const lines = panel.attainment[holder.dataset.pair].filter(line => !hidden.has(line.series));
    const [across, up] = [[0, ACCURACY], [1, ACCURACY], [0, 1]][holder.dataset.pair];
    const traces = [];
    for (const line of lines) {
      const look = model.series[line.series];
      const path = points => ({ x: points.map(p => p[0]), y: points.map(p => p[1]), line: { shape: "hv", color: look.color === "#000000" ? color("ink") : look.color } });
      if (String(line.series) === holder.dataset.chosen) {
        for (const [name, points] of [["best seed", line.best], ["worst seed", line.worst]]) {
          const trace = path(points);
          traces.push({ ...trace, type: "scatter", mode: "lines", opacity: 0.75, line: { ...trace.line, width: 1.2, dash: "dot" },
            hovertemplate: `${escaped(look.name)}, ${name}<extra></extra>` });
        }
      }
      const trace = path(line.median);
      traces.push({ ...trace, type: "scatter", mode: "lines+markers", name: look.name, line: { ...trace.line, width: 2, dash: look.dash },
        marker: { symbol: look.symbol, size: 8, color: trace.line.color },
        hovertemplate: `<b>${escaped(look.name)}</b>, median over seeds<br>${model.titles[across]}, ${model.titles[up]}: corner of the frontier<extra></extra>` });
    }
    return draw(holder, traces, layout({ xaxis: axis(panel, across), yaxis: axis(panel, up) }));
  }

  function draw(holder, traces, figure) {
    return Plotly.react(holder, traces, figure, config).then(() => {
      if (holder.dataset.bound) return;
      holder.dataset.bound = "1";
      holder.on("plotly_click", event => {
        const point = event.points.find(p => p.customdata !== undefined);
        if (point) show(point.customdata);
      });
    });
  }

  const painters = { plane: drawPlane, space: drawSpace, attainment: drawAttainment };
  const paint = holder => {
    holder.setAttribute("aria-busy", "true");
    return Promise.resolve(painters[holder.dataset.chart](holder)).then(() => holder.removeAttribute("aria-busy"));
  };
  const holders = [...document.querySelectorAll("[data-chart]")];

  function hasWebgl() {
    try { return Boolean(document.createElement("canvas").getContext("webgl2") || document.createElement("canvas").getContext("webgl")); }
    catch { return false; }
  }

  // ---- the configuration behind a point
  const dialog = document.getElementById("point");
  const rows = settings => Object.entries(settings).sort().map(([name, value]) => `<dt>${escaped(name)}</dt><dd>${escaped(value)}</dd>`).join("");

  function show(index) {
    const point = model.points[index];
    const look = model.series[point.series];
    const words = point.words.map((value, k) => `<div><dt>${escaped(model.titles[k])}</dt><dd>${escaped(value)}</dd></div>`).join("");
    const seeds = point.seeds.length === 1 ? `seed ${point.seeds[0]}` : `${point.seeds.length} seeds: ${point.seeds.join(", ")}`;
    const commands = point.commands.length
      ? `<h3>Repeat it</h3><pre><code>${escaped(point.commands[0])}</code></pre><button type="button" data-copy>Copy command</button>` +
        (point.commands.length > 1
          ? `<details><summary>The other ${point.commands.length - 1} seeds</summary><pre><code>${escaped(point.commands.slice(1).join("\n"))}</code></pre></details>` : "")
      : "";
    document.getElementById("point-body").innerHTML =
      `<p class="kicker">${escaped(point.data)} · ${escaped(point.privacy)}</p><h2><span aria-hidden="true">${look.glyph}</span> ${escaped(look.name)}</h2>` +
      `<p class="note">${escaped(seeds)}; ${point.front ? "on the frontier" : "dominated by another configuration"}` +
      `${point.undefined ? `; undefined in ${point.undefined} of them` : ""}${look.symbol.endsWith("-open") ? "; ε depends on private votes: operator only" : ""}</p>` +
      point.remarks.map(remark => `<p class="note">${escaped(remark)}</p>`).join("") +
      `<dl class="values">${words}</dl>` +
      (Object.keys(point.settings).length ? `<h3>Settings that differ within the method</h3><dl class="settings">${rows(point.settings)}</dl>` : "") +
      commands +
      `<details><summary>Settings that all its runs share</summary><dl class="settings">${rows(look.shared)}</dl></details>`;
    if (!dialog.open) dialog.show();
    dialog.dataset.point = String(index);
    dialog.scrollTop = 0;
  }

  document.addEventListener("click", event => {
    const target = event.target.closest("button");
    if (!target) return;
    if (target.dataset.point !== undefined) show(Number(target.dataset.point));
    if (target.dataset.close !== undefined) dialog.close();
    if (target.dataset.copy !== undefined) copy(target);
    if (target.dataset.series !== undefined) toggle(Number(target.dataset.series));
  });
  document.addEventListener("keydown", event => { if (event.key === "Escape" && dialog.open) dialog.close(); });

  function copy(button) {
    const code = dialog.querySelector("code");
    const done = () => { button.textContent = "Copied"; };
    const select = () => { getSelection().selectAllChildren(code); button.textContent = "Selected: press copy"; };
    navigator.clipboard ? navigator.clipboard.writeText(code.textContent).then(done, select) : select();
  }

  // ---- the notion of fairness that disparity is of
  function see(number) {
    const seen = model.notions[number];
    model.titles[1] = seen.measure;
    seen.points.forEach(([value, words, front, missing], index) => {
      const point = model.points[index];
      [point.values[1], point.words[1], point.front, point.undefined] = [value, words, front, missing];
    });
    seen.panels.forEach((panel, index) => Object.assign(model.panels[index], panel));
    for (const part of document.querySelectorAll("[data-notion]")) part.hidden = part.dataset.notion !== String(number);
    holders.filter(holder => holder.dataset.drawn).forEach(paint);
    if (dialog.open) show(Number(dialog.dataset.point));
  }
  document.getElementById("notion").addEventListener("change", event => see(Number(event.target.value)));

  // ---- controls
  function toggle(series) {
    hidden.has(series) ? hidden.delete(series) : hidden.add(series);
    for (const button of document.querySelectorAll(`button[data-series="${series}"]`)) button.setAttribute("aria-pressed", String(!hidden.has(series)));
    holders.filter(holder => holder.dataset.drawn).forEach(paint);
  }

  for (const control of document.querySelectorAll("[data-sets]")) {
    control.addEventListener("change", () => {
      const value = control.type === "checkbox" ? (control.checked ? "1" : "0") : control.value;
      for (const holder of holders.filter(h => h.dataset.section === control.dataset.section && control.dataset.charts.split(" ").includes(h.dataset.chart))) {
        holder.dataset[control.dataset.sets] = value;
        if (holder.dataset.drawn) paint(holder);
      }
    });
  }

  // ---- draw what comes into view; everything at once for print and for tests
  async function begin(holder) {
    if (holder.dataset.drawn) return;
    holder.dataset.drawn = "1";
    if (holder.dataset.chart === "space" && !hasWebgl()) {
      holder.outerHTML = '<p class="note">This browser has no WebGL, which the picture in space needs. The planes below show the same points.</p>';
      return;
    }
    await paint(holder);
  }
  const seen = new IntersectionObserver(entries => entries.filter(e => e.isIntersecting).forEach(e => begin(e.target)), { rootMargin: "400px" });
  holders.forEach(holder => seen.observe(holder));
  addEventListener("beforeprint", () => holders.forEach(begin));
  dark.addEventListener("change", () => { scale(); holders.filter(h => h.dataset.drawn).forEach(paint); });
  const scale = () => root.style.setProperty("--cividis", stops().join(","));
  scale();
  const wanted = location.hash.slice(1);
  if (wanted === "all" || wanted.startsWith("point-")) {
    Promise.all(holders.map(begin)).then(() => {
      if (wanted !== "all") show(Number(wanted.slice(6)));
      root.dataset.drawn = String(holders.length);
    });
  }
})();
