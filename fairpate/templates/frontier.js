"use strict";
// Draws the frontier's charts from the page's data, and shows the configuration behind a point.
(() => {
  const model = JSON.parse(document.getElementById("model").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const hidden = new Set();
  const [EPSILON, DISPARITY, ACCURACY, COVERAGE] = [0, 1, 2, 3];
  const MANY = 1500, CELL = 0.02;
  const config = { displayModeBar: false, responsive: true, displaylogo: false };
  root.dataset.errors = "0";
  addEventListener("error", () => { root.dataset.errors = String(Number(root.dataset.errors) + 1); });

  const color = name => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
  // Read once for a drawing: a style costs more than a mark.
  const palette = () => Object.fromEntries(["ink", "muted", "line", "paper", ...Array.from({ length: model.ink + 1 }, (_, k) => `m${k}`)].map(name => [name, color(name)]));

  // ---- what is drawn of a panel: points with their rank among its coordinates
  function visible(holder, panel) {
    const level = holder.dataset.level === "" || holder.dataset.level === undefined ? Infinity : Number(holder.dataset.level);
    const only = holder.dataset.only === "1", shown = [];
    panel.points.forEach((index, rank) => {
      const point = model.points[index];
      if (!hidden.has(point.series) && (point.front || !only) && panel.levels[rank] <= level) shown.push({ index, rank, point });
    });
    return shown;
  }

  const coordinate = (panel, rank, objective) =>
    objective === EPSILON ? panel.positions[rank] : model.points[panel.points[rank]].values[objective];

  // Of many points of a method in one place one is drawn: first those on the frontier.
  function thinned(panel, shown, [across, up]) {
    if (shown.length <= MANY) return shown;
    const length = objective => panel.extents[objective][1] - panel.extents[objective][0];
    const taken = new Set();
    return [...shown].sort((a, b) => b.point.front - a.point.front).filter(({ rank, point }) => {
      const cell = [across, up].map(objective => Math.round(coordinate(panel, rank, objective) / length(objective) / CELL));
      const key = `${point.series}:${cell}`;
      return !taken.has(key) && taken.add(key);
    });
  }

  function grouped(shown) {
    const groups = new Map();
    for (const each of shown) {
      if (!groups.has(each.point.series)) groups.set(each.point.series, []);
      groups.get(each.point.series).push(each);
    }
    return [...groups].sort((a, b) => a[0] - b[0]);
  }

  const hover = ({ point }) =>
    `<b>${escaped(model.series[point.series].name)}</b><br>ε ${point.words[0]}<br>${model.titles[1]} ${point.words[1]}` +
    `<br>accuracy ${point.words[2]}<br>coverage ${point.words[3]}` +
    point.cautions.map(words => `<br>${escaped(words)}`).join("") + "<extra></extra>";

  function axis(panel, objective, inks) {
    const common = {
      title: { text: model.titles[objective], font: { size: 13, color: inks.muted } }, range: panel.extents[objective],
      tickfont: { size: 12, color: inks.muted }, gridcolor: inks.line, linecolor: inks.muted,
      zeroline: false, showline: true, fixedrange: coarse, automargin: true,
    };
    if (objective === EPSILON) return { ...common, tickvals: panel.ticks.map(t => t[0]), ticktext: panel.ticks.map(t => t[1]) };
    return objective >= ACCURACY ? { ...common, tickformat: ".3~%" } : common;
  }

  function layout(inks, more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, color: inks.ink, size: 12 },
      hoverlabel: { bgcolor: inks.paper, bordercolor: inks.muted, font: { color: inks.ink, size: 13 }, align: "left" },
      margin: { l: 48, r: 8, t: 8, b: 44 }, hovermode: "closest", dragmode: coarse ? false : "zoom", ...more,
    };
  }

  // ---- planes
  function drawPlane(holder) {
    const panel = model.panels[holder.dataset.panel], inks = palette();
    const number = Number(holder.dataset.plane), plane = model.planes[number], [across, up] = plane;
    const [low, high] = panel.extents[across];
    const x = rank => coordinate(panel, rank, across) + panel.shifts[number][rank] / 1000 * (high - low);
    const y = rank => coordinate(panel, rank, up);
    const shown = visible(holder, panel), points = thinned(panel, shown, plane);
    const there = new Set(shown.map(each => each.rank));
    const lines = (across === EPSILON ? panel.lines : []).map(([series, ranks]) => [series, ranks.filter(rank => there.has(rank))]).map(([series, ranks]) => {
      const look = model.series[series];
      return { type: "scatter", mode: "lines", hoverinfo: "skip", x: ranks.map(x), y: ranks.map(y), opacity: 0.6,
        line: { color: inks[`m${look.place}`], width: 1.4, dash: look.dash } };
    });
    const marks = grouped(points).map(([series, members]) => {
      const look = model.series[series];
      return {
        type: "scatter", mode: "markers", name: look.name, x: members.map(p => x(p.rank)), y: members.map(p => y(p.rank)),
        customdata: members.map(p => p.index), hovertemplate: members.map(hover),
        marker: {
          symbol: look.symbol, size: members.map(p => panel.sizes[p.rank]), color: inks[`m${look.place}`],
          opacity: members.map(p => (p.point.front ? 1 : 0.4)), line: { width: look.hollow ? 2 : 0.6, color: look.hollow ? inks[`m${look.place}`] : inks.paper },
        },
      };
    });
    const crossed = points.filter(p => p.point.degenerate.length);
    if (crossed.length) {
      marks.push({ type: "scatter", mode: "markers", hoverinfo: "skip", x: crossed.map(p => x(p.rank)), y: crossed.map(p => y(p.rank)),
        marker: { symbol: "x-thin", size: crossed.map(p => panel.sizes[p.rank] + 6), line: { width: 1.4, color: inks.ink } } });
    }
    const missing = shown.length - points.length;
    note(holder, missing ? `${missing} of ${shown.length} points lie under others of their method and are not drawn.` : "");
    return draw(holder, [...lines, ...marks], layout(inks, { xaxis: axis(panel, across, inks), yaxis: axis(panel, up, inks) }));
  }

  function note(holder, words) {
    let line = holder.nextElementSibling;
    if (!words && !line) return;
    if (!line) {
      line = holder.parentElement.appendChild(document.createElement("p"));
      line.className = "note";
    }
    line.textContent = words;
  }

  // ---- attainment: medians of all methods; best to worst of the chosen one
  function drawAttainment(holder) {
    const panel = model.panels[holder.dataset.panel], inks = palette();
    const lines = panel.attainment[holder.dataset.pair].filter(line => !hidden.has(line.series));
    const [across, up] = [[EPSILON, ACCURACY], [DISPARITY, ACCURACY], [EPSILON, DISPARITY]][holder.dataset.pair];
    const traces = [];
    for (const line of lines) {
      const look = model.series[line.series], ink = inks[`m${look.place}`];
      const path = points => ({ x: points.map(p => p[0]), y: points.map(p => p[1]), line: { shape: "hv", color: ink } });
      if (String(line.series) === holder.dataset.chosen) {
        for (const [name, points] of [["best seed", line.best], ["worst seed", line.worst]]) {
          const trace = path(points);
          traces.push({ ...trace, type: "scatter", mode: "lines", opacity: 0.75, line: { ...trace.line, width: 1.2, dash: "dot" },
            hovertemplate: `${escaped(look.name)}, ${name}<extra></extra>` });
        }
      }
      const trace = path(line.median);
      traces.push({ ...trace, type: "scatter", mode: "lines+markers", name: look.name, line: { ...trace.line, width: 2, dash: look.dash },
        marker: { symbol: look.symbol, size: 8, color: ink },
        hovertemplate: `<b>${escaped(look.name)}</b>, median over seeds<br>${model.titles[across]}, ${model.titles[up]}: corner of the frontier<extra></extra>` });
    }
    return draw(holder, traces, layout(inks, { xaxis: axis(panel, across, inks), yaxis: axis(panel, up, inks) }));
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

  const painters = { plane: drawPlane, attainment: drawAttainment };
  const paint = holder => {
    holder.setAttribute("aria-busy", "true");
    return Promise.resolve(painters[holder.dataset.chart](holder)).then(() => holder.removeAttribute("aria-busy"));
  };
  const holders = [...document.querySelectorAll("[data-chart]")];

  // ---- the configuration behind a point
  const dialog = document.getElementById("point");
  const rows = settings => Object.entries(settings).sort().map(([name, value]) => `<dt>${escaped(name)}</dt><dd>${escaped(value)}</dd>`).join("");
  const mark = look => `<svg class="m${look.place} ${look.hollow ? "hollow" : "filled"}" viewBox="0 0 16 16" aria-hidden="true"><path d="${look.path}"/></svg>`;
  const standing = point => (point.degenerate.length ? "degenerate, so on no frontier" : point.front ? "on the frontier" : "dominated by another configuration");

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
      `<p class="kicker">${escaped(point.data)} · ${escaped(point.privacy)}</p><h2 class="name">${mark(look)} ${escaped(look.name)}</h2>` +
      `<p class="note">${escaped(seeds)}; ${point.undefined ? `undefined in ${point.undefined} of them` : standing(point)}` +
      `${look.hollow ? "; ε depends on private votes: operator only" : ""}</p>` +
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
  const redraw = () => holders.filter(holder => holder.dataset.drawn).forEach(paint);

  function see(number) {
    const seen = model.notions[number];
    model.titles[1] = seen.measure;
    seen.points.forEach(([value, words, front, missing], index) => {
      const point = model.points[index];
      [point.values[1], point.words[1], point.front, point.undefined] = [value, words, front, missing];
    });
    seen.panels.forEach((panel, index) => Object.assign(model.panels[index], panel));
    for (const part of document.querySelectorAll("[data-notion]")) part.hidden = part.dataset.notion !== String(number);
    redraw();
    if (dialog.open) show(Number(dialog.dataset.point));
  }
  document.getElementById("notion").addEventListener("change", event => see(Number(event.target.value)));

  // ---- controls: for all charts of a section, or for the one of a panel that takes them
  function toggle(series) {
    hidden.has(series) ? hidden.delete(series) : hidden.add(series);
    for (const button of document.querySelectorAll(`button[data-series="${series}"]`)) button.setAttribute("aria-pressed", String(!hidden.has(series)));
    redraw();
  }

  function isSet(holder, { section, charts, panel, sets }) {
    if (holder.dataset.section !== section || !charts.split(" ").includes(holder.dataset.chart)) return false;
    return !panel || (holder.dataset.panel === panel && holder.dataset.takes === sets);
  }

  for (const control of document.querySelectorAll("[data-sets]")) {
    control.addEventListener("change", () => {
      const value = control.type === "checkbox" ? (control.checked ? "1" : "0") : control.value;
      for (const holder of holders.filter(each => isSet(each, control.dataset))) {
        holder.dataset[control.dataset.sets] = value;
        if (holder.dataset.drawn) paint(holder);
      }
    });
  }

  // ---- draw what comes into view; everything at once for print and for tests.
  async function begin(holder) {
    if (holder.dataset.drawn) return;
    holder.dataset.drawn = "1";
    await paint(holder);
  }

  const seen = new IntersectionObserver(entries => entries.filter(e => e.isIntersecting).forEach(e => begin(e.target)), { rootMargin: "400px" });
  holders.filter(holder => !holder.hidden).forEach(holder => seen.observe(holder));
  addEventListener("beforeprint", () => holders.filter(holder => !holder.hidden).forEach(begin));
  dark.addEventListener("change", redraw);
  const wanted = location.hash.slice(1);
  if (wanted === "all" || wanted.startsWith("point-")) {
    Promise.all(holders.filter(holder => !holder.hidden).map(begin)).then(() => {
      if (wanted !== "all") show(Number(wanted.slice(6)));
      root.dataset.drawn = String(holders.length);
    });
  }
})();
