"use strict";
// Embeds the page's charts, passes its controls on to them, and shows the configuration behind a point.
(() => {
  const model = JSON.parse(document.getElementById("model").textContent);
  const root = document.documentElement;
  const hidden = new Set(), views = new Map();
  const holders = [...document.querySelectorAll("[data-chart]")];
  let notion = 0;
  root.dataset.errors = "0";
  addEventListener("error", () => { root.dataset.errors = String(Number(root.dataset.errors) + 1); });

  // The library that draws: compressed, so that the page is half as large.
  const library = (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), c => c.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  })();

  const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);

  // ---- charts: a specification of the page, over the rows of its panel and notion
  function tooltip(row) {
    if (row.i === undefined) return `<b>${escaped(row.s)}</b><br>corner of the frontier with half of the seeds`;
    const { words, cautions } = model.points[row.i];
    const named = model.titles.map((title, k) => `${k ? escaped(title) : "ε"} ${escaped(words[k])}`);
    return [`<b>${escaped(row.s)}</b>`, ...named, ...cautions.map(escaped)].join("<br>");
  }

  // The interpreter evaluates expressions without eval, which the page's policy forbids.
  const options = {
    ast: true, actions: false, renderer: "svg", config: model.config,
    tooltip: { formatTooltip: tooltip, disableDefaultStyle: true },
  };

  const unpacked = ({ names, rows }) => rows.map(row => Object.fromEntries(names.map((name, k) => [name, row[k]])));

  function setSignals(holder) {
    const view = views.get(holder);
    const { level, only, chosen, budget, gap, picked } = holder.dataset;
    if (level !== undefined) view.signal("level", Number(level));
    if (picked !== undefined) view.signal("budget", Number(budget)).signal("gap", Number(gap)).signal("picked", Number(picked));
    view.signal("only", only === "1").signal("chosen", chosen ?? "").signal("hidden", [...hidden]);
    return view.runAsync();
  }

  async function draw(holder) {
    holder.dataset.drawn = "1";
    holder.setAttribute("aria-busy", "true");
    try {
      await library;
    } catch {
      holder.textContent = "This browser cannot unpack the drawing library; take one of 2023 or later.";
      return;
    }
    const { data, [holder.dataset.chart]: numbers } = model.panels[holder.dataset.panel].charts[notion];
    const specification = { ...model.specifications[numbers[holder.dataset.number]], description: holder.getAttribute("aria-label") };
    const drawnRows = unpacked(data[specification.data.name]);
    if (holder.dataset.picked !== undefined) for (const row of drawnRows) row.v = epsilonOf(model.points[row.i].words[0]);
    specification.datasets = { [specification.data.name]: drawnRows };
    views.get(holder)?.finalize();
    const { view } = await vegaEmbed(holder, specification, options);
    views.set(holder, view);
    view.addEventListener("click", (_, item) => { if (item?.datum?.i !== undefined) show(item.datum.i); });
    await setSignals(holder);
    holder.removeAttribute("aria-busy");
  }

  const drawn = () => holders.filter(holder => views.has(holder));

  // ---- the configuration behind a point
  const dialog = document.getElementById("point");
  const rows = settings => Object.entries(settings).sort().map(([name, value]) => `<dt>${escaped(name)}</dt><dd>${escaped(value)}</dd>`).join("");
  // No line ends inside the name of an option.
  const command = text => escaped(text).replace(/(^|\s)(--?[\w-]+)/g, '$1<span class="option">$2</span>');
  const mark = look => `<svg class="m${look.place} ${look.hollow ? "hollow" : "filled"}" viewBox="-1 -1 2 2" aria-hidden="true"><path d="${look.path}"/></svg>`;
  const standing = point => (point.degenerate.length ? "degenerate, so on no frontier" : point.front ? "on the frontier" : "dominated by another configuration");

  function show(index) {
    const point = model.points[index];
    const look = model.series[point.series];
    const words = point.words.map((value, k) => `<div><dt>${escaped(model.titles[k])}</dt><dd>${escaped(value)}</dd></div>`).join("");
    const seeds = point.seeds.length === 1 ? `seed ${point.seeds[0]}` : `${point.seeds.length} seeds: ${point.seeds.join(", ")}`;
    const commands = point.commands.length
      ? `<h3>Repeat it</h3><pre><code>${command(point.commands[0])}</code></pre><button type="button" data-copy>Copy command</button>` +
        (point.commands.length > 1
          ? `<details><summary>The other ${point.commands.length - 1} runs</summary><pre><code>${escaped(point.commands.slice(1).join("\n"))}</code></pre></details>` : "")
      : "";
    document.getElementById("point-body").innerHTML =
      `<p class="kicker">${escaped(point.data)} · ${escaped(model.sentences[point.privacy])}</p><h2 class="name">${mark(look)} ${escaped(look.name)}</h2>` +
      `<p class="note">${escaped(seeds)}; ${point.undefined ? `undefined in ${point.undefined} of them` : standing(point)}` +
      `${look.hollow ? "; ε depends on private votes: operator only" : ""}</p>` +
      point.remarks.map(remark => `<p class="note">${escaped(remark)}</p>`).join("") +
      `<dl class="values">${words}</dl><p class="note">${escaped(model.sentences[point.private])} ${judged(index)}</p>` +
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
    const code = button.previousElementSibling;
    const done = () => { button.textContent = "Copied"; };
    const select = () => { getSelection().selectAllChildren(code); button.textContent = "Selected: press copy"; };
    navigator.clipboard ? navigator.clipboard.writeText(code.textContent).then(done, select) : select();
  }

  // ---- the choice within limits: the first of the panel's ranked points that keeps both
  const digits = value => (Math.abs(100 * value - Math.round(100 * value)) < 1e-9 ? 2 : 3);
  // Whether a point is fair by the user's rule, in words; the rule is that of a run's report.
  const judged = index => escaped(model.judged[index]);
  const epsilonOf = words => (words.startsWith("∞") ? Infinity : parseFloat(words));
  const named = index => `<button type="button" class="name" data-point="${index}">${mark(model.series[model.points[index].series])} ${escaped(model.series[model.points[index].series].name)}</button>`;

  function choose(box) {
    const [budget, gap] = box.querySelectorAll("input");
    const limit = box.dataset.budgets.split(" ")[budget.value], most = Number(gap.value);
    budget.nextElementSibling.textContent = limit;
    gap.nextElementSibling.textContent = most.toFixed(digits(most));
    const ranked = box.dataset.ranked.split(";")[notion].trim().split(" ").filter(Boolean).map(Number);
    const affordable = ranked.filter(index => epsilonOf(model.points[index].words[0]) <= epsilonOf(limit));
    const kept = affordable.filter(index => model.points[index].values[1] <= most);
    const answer = box.querySelector(".answer"), chart = box.querySelector("[data-picked]");
    Object.assign(chart.dataset, { budget: String(epsilonOf(limit)), gap: String(most), picked: String(kept.length ? kept[0] : -1) });
    if (views.has(chart)) setSignals(chart);
    if (!kept.length) {
      const least = affordable.reduce((a, b) => (model.points[b].values[1] < model.points[a].values[1] ? b : a), affordable[0]);
      answer.innerHTML = "<p>No configuration keeps both." + (least === undefined ? " None has so small an ε." : ` The smallest gap at this ε is ${escaped(model.points[least].words[1])}: ${named(least)}.`) + "</p>";
      return;
    }
    const point = model.points[kept[0]];
    const others = new Map();
    for (const index of kept) if (model.points[index].series !== point.series && !others.has(model.points[index].series)) others.set(model.points[index].series, index);
    const also = [...others.values()].map(index => `${named(index)} ${escaped(model.points[index].words[2])}`).join(", ");
    const words = point.words.map((value, k) => `<div><dt>${escaped(model.titles[k])}</dt><dd>${escaped(value)}</dd></div>`).join("");
    const by = document.getElementById("notion").selectedOptions[0].dataset.name;
    const least = most.toFixed(digits(most));
    const asked = by === "demographic_parity" ? `--disparity ${least}` : `--fairness ${by}=${least}`;
    answer.innerHTML = `<p>${named(kept[0])}${point.seeds.length < 3 ? ` <small>run ${point.seeds.length > 1 ? "twice" : "once"}: its lead may be chance</small>` : ""}</p>` +
      `<dl class="values">${words}</dl><p class="note">${escaped(model.sentences[point.private])} ${judged(kept[0])}</p>` +
      (point.commands.length ? `<pre><code>${command(point.commands[0])}</code></pre><button type="button" data-copy>Copy command</button>` : "") +
      `<p class="note">${also ? `Other methods within both limits, with their accuracy: ${also}. ` : "No other method keeps both limits. "}` +
      `The same answer in the terminal: <code>${command(`fairpate specify ${limit === "∞" ? "" : `--epsilon ${limit} `}${asked} --data ${box.dataset.data}`)}</code></p>`;
  }

  const boxes = [...document.querySelectorAll(".limits")];
  for (const box of boxes) {
    for (const input of box.querySelectorAll("input")) input.addEventListener("input", () => choose(box));
    choose(box);
  }

  // ---- controls
  document.getElementById("notion").addEventListener("change", event => {
    notion = Number(event.target.value);
    const seen = model.notions[notion];
    model.titles[1] = seen.measure;
    seen.points.forEach(([value, words, front, missing], index) => {
      const point = model.points[index];
      [point.values[1], point.words[1], point.front, point.undefined] = [value, words, front, missing];
    });
    for (const part of document.querySelectorAll("[data-notion]")) part.hidden = part.dataset.notion !== String(notion);
    drawn().forEach(draw);
    if (seen.name === model.fair.notion) for (const box of boxes) box.querySelectorAll("input")[1].value = model.fair.limit;
    boxes.forEach(choose);
    if (dialog.open) show(Number(dialog.dataset.point));
  });

  function toggle(number) {
    const { name } = model.series[number];
    if (!hidden.delete(name)) hidden.add(name);
    for (const button of document.querySelectorAll(`button[data-series="${number}"]`)) button.setAttribute("aria-pressed", String(!hidden.has(name)));
    drawn().forEach(setSignals);
  }

  // A control is for the charts of its section: all of a kind, or the one in a place of a panel.
  function isSet(holder, { section, charts, panel }) {
    if (holder.dataset.section !== section || (panel && holder.dataset.panel !== panel)) return false;
    return charts === (panel ? holder.dataset.place : holder.dataset.chart);
  }

  for (const control of document.querySelectorAll("[data-sets]")) {
    control.addEventListener("input", () => {
      const { sets, words } = control.dataset;
      if (words) control.nextElementSibling.textContent = words.split(" ")[control.value];
      for (const holder of holders.filter(each => isSet(each, control.dataset))) {
        holder.dataset[sets] = control.type === "checkbox" ? String(Number(control.checked)) : control.value;
        if (views.has(holder)) (sets === "number" ? draw : setSignals)(holder);
      }
    });
  }

  // ---- draw what comes into view; everything at once for print and for tests
  const begin = holder => (holder.dataset.drawn ? null : draw(holder));
  const seen = new IntersectionObserver(entries => entries.filter(e => e.isIntersecting).forEach(e => begin(e.target)), { rootMargin: "400px" });
  holders.forEach(holder => seen.observe(holder));
  addEventListener("beforeprint", () => holders.forEach(begin));
  const wanted = location.hash.slice(1);
  if (wanted === "all" || wanted.startsWith("point-")) {
    Promise.all(holders.map(begin)).then(() => {
      if (wanted !== "all") show(Number(wanted.slice(6)));
      root.dataset.drawn = String(holders.length);
    });
  }
})();
