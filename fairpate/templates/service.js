"use strict";
// The page of an aggregator: it calls the service's own routes and shows their replies. Names of classes, groups and
// columns are shown as text: no text becomes markup here. The token is kept in this tab alone.

// Several runs may share this origin, so each keeps its token and answers under its own path.
const [TOKEN, ANSWERS] = ["token", "answers"].map((name) => `fairpate-${name} ${location.pathname}`);
const MOST_QUERIES = 1024, MOST_SHOWN = 500;
const FIRST_PAUSE_MS = 1000, LONGEST_PAUSE_MS = 30000;
const byId = (id) => document.getElementById(id);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
let about = null, statement = null, me = null, budget = null, answers = [], visit = null;

// ---- talking to the service

class Trouble extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {}, token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Trouble("The service does not answer.", 0);
  }
  if (!response.ok) throw new Trouble(await explained(response), response.status);
  return response;
}

async function explained(response) {
  try {
    const { errors } = await response.json();
    return errors.map((e) => `${e.field}${e.value ? `: got ${e.value}` : ""}. ${e.remedy}`).join(" ");
  } catch {
    return `The service answered with status ${response.status}.`;
  }
}

const ask = async (path, options) => (await request(path, options)).json();

// Server-sent events by fetch, because an EventSource sends no token.
async function* events(path, signal) {
  const response = await request(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (unread + value).split("\n\n");
    unread = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("");
      if (data) yield JSON.parse(data);
    }
  }
}

// Show each state until the visit ends. If events fail, ask for the state, less and less often.
async function follow(stream, plain, show, signal) {
  let wait = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    try {
      for await (const state of events(stream, signal)) {
        wait = FIRST_PAUSE_MS;
        pulse("Live.");
        show(state);
      }
    } catch (trouble) {
      if (signal.aborted) return;
      if (trouble.status === 401) return leave("This token is no longer known. Ask the operator for another.");
      if (trouble.status) await once(plain, show).catch(() => {});
      else pulse(`The service does not answer; trying again every ${Math.round(wait / 1000)} s. What is shown is old.`);
    }
    await pause(wait);
    wait = Math.min(2 * wait, LONGEST_PAUSE_MS);
  }
}

async function once(path, show) {
  show(await ask(path));
  pulse("Connected; updated now and then.");
}

// ---- elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function say(id, text) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
}

const pulse = (text) => say("pulse", text);
const count = (number) => number.toLocaleString("en");
const counted = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;
const queries = (number) => counted(number, "query", "queries");
// Rounded up: what is spent, and a delta, are bounds.
const upTo = (number, digits) => {
  const rounded = Number(number.toPrecision(digits));
  if (rounded >= number) return rounded;
  return Number((rounded + 10 ** (Math.floor(Math.log10(number)) - digits + 1)).toPrecision(digits));
};
const decimal = (number) => (number === null ? "∞" : upTo(number, 3).toString());
const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";
// As commands and reports write it: one digit with a power of ten, or else six digits.
const delta = (number) => {
  const [head, power] = number.toExponential().split("e");
  const raised = `10${power.replace("-", "⁻").replace("+", "").replace(/\d/g, (digit) => RAISED[digit])}`;
  if (head.length === 1) return head === "1" ? raised : `${head}·${raised}`;
  const rounded = upTo(number, 6);
  const [digits, exponent] = rounded.toExponential().split("e-");
  return exponent > 4 ? `${digits}e-${exponent.padStart(2, "0")}` : String(rounded);
};
const time = (seconds) => new Date(1000 * seconds).toLocaleString();
const labelled = (answer) =>
  answer.status === "answered" ? statement.label_names[answer.label]
    : answer.status === "refused" ? "refused" : "not asked: the budget has no room";

const lead = (answer) =>
  answer.free ? "no votes used: free"
    : answer.lead == null ? ""
      : `${counted(answer.lead, "vote", "votes")}${STANDS_OUT[answer.stands_out] ?? ""}`;
const STANDS_OUT = { true: ", stands out", false: ", within the noise" };

// Return a word of the glossary as a button that shows its meaning; any other word unchanged.
function withMeaning(word) {
  const known = [...byId("words").content.children].find((button) => button.textContent === word);
  return known ? known.cloneNode(true) : word;
}

function describe(id, pairs) {
  if (byId(id).contains(document.activeElement)) return; // a meaning that is being read stays
  const items = pairs.filter(([, text]) => text).flatMap(([term, text]) => [
    element("dt", {}, withMeaning(term)), element("dd", {}, text),
  ]);
  byId(id).replaceChildren(...items);
}

function table(head, rows) {
  const cell = (name, value) =>
    element(name, typeof value === "number" ? { class: "number" } : {},
      typeof value === "number" ? count(value) : value);
  return element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value) => cell("td", value))))));
}

// ---- charts: lines over time, each with the same in words

function svg(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// Draw one bar for each number, from left to right; `named` returns the label of a bar.
function bars(words, numbers, named) {
  const width = Math.min(640, byId("main").clientWidth), height = 140, bottom = 20, top = Math.max(1, ...numbers);
  const step = width / numbers.length, drawn = svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words,
  });
  numbers.forEach((number, i) => {
    const tall = (number / top) * (height - bottom - 4);
    const bar = svg("rect", { class: "bar", x: i * step + 1, y: height - bottom - tall, width: step - 2, height: tall });
    bar.append(svg("title", {}, `${named(i)}: ${queries(number)}`));
    drawn.append(bar);
  });
  drawn.append(svg("line", { class: "axis", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }),
    svg("text", { x: 0, y: height - 4 }, "0 %"), svg("text", { x: width, y: height - 4, "text-anchor": "end" }, "100 %"));
  return element("figure", {}, drawn, element("figcaption", {}, words));
}

function chart(words, lines, { from, to, top, widest }) {
  const width = Math.min(widest, byId("main").clientWidth), height = 160, left = 8, bottom = 24, head = 20;
  const x = (t) => left + ((t - from) / Math.max(to - from, 1)) * (width - 2 * left);
  const y = (v) => height - bottom - (v / Math.max(top, 1)) * (height - bottom - head);
  const drawn = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words });
  drawn.append(
    svg("line", { class: "axis", x1: left, x2: width - left, y1: y(0), y2: y(0) }),
    svg("text", { x: left, y: 14 }, count(Math.round(top))),
    svg("text", { x: left, y: height - 8 }, time(from)),
    svg("text", { x: width - left, y: height - 8, "text-anchor": "end" }, time(to)),
    ...lines.map(({ kind, points }) =>
      svg("polyline", { class: `line ${kind}`, points: points.map(([t, v]) => `${x(t)},${y(v)}`).join(" ") })));
  return element("figure", {}, drawn, element("figcaption", {}, words));
}

// ---- the analyst's part

function showAbout() {
  const shape = statement.record_shape.join(" × ");
  describe("about", [
    ["Run", about.run],
    ["Method", about.method],
    ["Data set", [about.data, about.task].filter(Boolean).join(": ")],
    ["Public pool", `${counted(statement.pool_size, "record", "records")}, each of ${about.record || `${shape} features`}`],
    ["Classes", statement.label_names.join(", ")],
    [`Groups (${about.attribute})`, statement.group_names.join(", ")],
    ["Protected", `one ${statement.unit} (${statement.relation})`],
    ["Mechanism", about.mechanism],
    ["Lead needed", about.lead],
    ["Fairness gate", about.gate],
    ["Noise", about.is_private ? "" : "Seeded, so anyone can reproduce the replies. Not private."],
    ["You are", `${about.caller.name} (${about.caller.role})`],
  ]);
  say("guarantee", about.guarantee);
  say("numbers-note", `From 0 to ${statement.pool_size - 1}: 17, or 3, 5, 8, or 0:20 for 0 to 19.`);
  say("features-note", `Nested lists of ${shape} numbers.`);
  say("group-label", `Group (${about.attribute})`);
  byId("group").replaceChildren(...statement.group_names.map((name) => element("option", { value: name }, name)));
  byId("by-form").hidden = about.form === null || !about.takes_posted;
  byId("by-features").hidden = !about.takes_posted;
  byId("columns").replaceChildren(...(about.form ?? []).map(column));
  choose();
}

function column(field, place) {
  const id = `column-${place}`, note = `${id}-note`, required = field.is_optional ? {} : { required: "" };
  const option = (value, text = value) => element("option", { value }, text);
  const unknown = field.is_optional ? [option("", "not known")] : [];
  const attributes = { id, "aria-describedby": note, ...required };
  const input = field.low !== null ? element("input", { ...attributes, type: "number", step: "any" })
    : field.takes_other ? element("input", { ...attributes, list: `${id}-list` })
      : element("select", { id, ...required }, ...unknown, ...field.choices.map((choice) => option(choice)));
  const words = [
    field.low !== null ? `${field.low} to ${field.high}; beyond, the nearer end counts` : "",
    field.takes_other ? "or anything else" : "",
    field.is_optional && field.low !== null ? "empty: not known" : "",
  ].filter(Boolean).join("; ");
  const list = element("datalist", { id: `${id}-list` }, ...field.choices.map((choice) => option(choice)));
  return element("div", {}, element("label", { for: id }, field.name), input,
    ...(field.takes_other ? [list] : []), ...(words ? [element("p", { id: note, class: "note" }, words)] : []));
}

function showState(state) {
  budget = state.budget;
  const { queries_submitted: spent, epsilon_limit: limit, epsilon_submitted: epsilon } = budget;
  const left = state.queries_left;
  const room = left === null ? `${queries(spent)} asked; the budget ends when the votes say so.`
    : `${queries(left)} left of ${count(left + spent)}.`;
  const usedUp = "The budget is used up: stored answers are still given, new queries are not.";
  say("left", budget.closed ? usedUp : room);
  const bar = byId("spent");
  bar.hidden = left === null;
  bar.max = Math.max(1, left + spent);
  bar.value = spent;
  bar.textContent = room;
  const price = `ε ${decimal(epsilon)}${limit === null ? "" : ` of ${decimal(limit)}`} is spent (δ ${delta(budget.delta)}).`;
  say("own", [price, own()].filter(Boolean).join(" "));
  const reasons = state.health.reasons.join(", ");
  say("trouble", reasons && `New queries are not answered now (${reasons}); stored answers are.`);
  document.documentElement.dataset.drawn = 1;
}

// The caller's own limit and charges, in addition to the shared budget.
function own() {
  const parts = [];
  if (me.left !== null) parts.push(`Of your own limit ${queries(me.left.queries)} are left.`);
  if (me.limit.per_day !== null) parts.push(`You may ask ${queries(me.limit.per_day)} a day.`);
  if (me.spent.queries) parts.push(`You were charged with ${queries(me.spent.queries)}.`);
  if (me.expires_s !== null) parts.push(`Your token ends ${time(me.expires_s)}.`);
  return parts.join(" ");
}

// ---- asking

function kind() {
  return new FormData(byId("ask")).get("kind");
}

// The queries as the service takes them, with a word for each; an error names what is wrong.
function questions() {
  if (kind() === "number") return numbers(byId("numbers").value).map((id) => [`record ${id}`, { id }]);
  const group = byId("group").value;
  if (kind() === "features") return [[`features, ${group}`, { features: JSON.parse(byId("features").value), group }]];
  const record = {};
  about.form.forEach((field, place) => {
    const { value } = byId(`column-${place}`);
    if (value !== "") record[field.name] = field.low !== null ? Number(value) : value;
  });
  const begins = about.form.slice(0, 3).map((field) => record[field.name] ?? "?").join(", ");
  return [[`${begins}…, ${group}`, { record, group }]];
}

function numbers(text) {
  const found = text.split(/[\s,]+/).filter(Boolean).flatMap((part) => {
    if (!/^\d{1,9}(:\d{1,9})?$/.test(part)) throw new Error(`Expected a number, or a range such as 0:20; got ${part}.`);
    const [first, end = Number(part) + 1] = part.split(":").map(Number);
    if (end - first > MOST_QUERIES) throw new Error(`Ask at most ${count(MOST_QUERIES)} at once.`);
    return Array.from({ length: Math.max(0, end - first) }, (_, i) => first + i);
  });
  if (!found.length) throw new Error("Give a number.");
  if (found.length > MOST_QUERIES) throw new Error(`Ask at most ${count(MOST_QUERIES)} at once.`);
  return found;
}

async function showCost() {
  const form = byId("ask");
  if (!form.checkValidity() || (kind() === "number" && !byId("numbers").value.trim())) return say("cost", "");
  try {
    const asked = questions().map(([, query]) => query);
    const told = await ask("v1/estimate", { method: "POST", body: { queries: asked } });
    const before = decimal(told.now.epsilon_submitted), after = decimal(told.afterwards.epsilon_submitted);
    const known = told.without_votes ? ` ${count(told.without_votes)} answered by the released model: free.` : "";
    const stored = (told.stored_replies ? ` ${count(told.stored_replies)} stored already: free.` : "") + known;
    const cost = told.new_queries
      ? `${queries(told.new_queries)} new: the spent ε goes from ${before} to ${after}, whether answered or refused.`
      : "No new query: free.";
    const closed = told.new_queries && told.now.closed ? " The budget has no room for new queries: they will not be asked." : "";
    return say("cost", cost + stored + closed);
  } catch (trouble) {
    return say("cost", trouble.message);
  }
}

async function submit(event) {
  event.preventDefault();
  byId("submit").disabled = true;
  try {
    const asked = questions();
    const told = await ask("v1/queries", { method: "POST", body: { queries: asked.map(([, query]) => query) } });
    remember(told.replies.map((reply, i) => ({ query: asked[i][0], ...reply })));
    const became = (status) => told.replies.filter((reply) => reply.status === status).length;
    const left = became("over_budget");
    const rest = left ? `, ${count(left)} not asked: the budget has no room` : "";
    say("told", `${count(became("answered"))} of ${queries(told.replies.length)} answered${rest}.`);
    me = await ask("v1/me");
    await showCost();
  } catch (trouble) {
    say("told", `Not asked. ${trouble.message}`);
  } finally {
    byId("submit").disabled = false;
  }
}

function remember(found) {
  const known = new Map(answers.map((answer) => [answer.key, answer]));
  for (const answer of found) known.set(answer.key, answer);
  answers = [...known.values()];
  sessionStorage.setItem(ANSWERS, JSON.stringify(answers));
  showAnswers();
}

function showAnswers() {
  const shown = answers.slice(-MOST_SHOWN).reverse();
  const rows = shown.map((answer) => [answer.query, labelled(answer), lead(answer), element("code", {}, answer.key)]);
  const rest = `The last ${count(MOST_SHOWN)} of ${count(answers.length)}; a download has all.`;
  byId("answers").replaceChildren(
    ...(rows.length ? [table(["Asked", "Answer", "Lead", "Key"], rows)] : []),
    ...(answers.length > shown.length ? [element("p", { class: "note" }, rest)] : []));
  byId("downloads").hidden = !answers.some((answer) => answer.status !== "over_budget");
  if (!rows.length) say("told", "No query was asked in this tab yet.");
}

async function lookUp(event) {
  event.preventDefault();
  try {
    const reply = await ask(`v1/queries/${byId("key").value}`);
    remember([{ query: "by key", ...reply }]);
    say("told", `Stored: ${labelled(reply)}.`);
  } catch (trouble) {
    say("told", trouble.message);
  }
}

async function download(event) {
  const { format } = event.target.dataset;
  const keys = answers.filter((answer) => answer.status !== "over_budget").map((answer) => answer.key);
  try {
    const response = await request("v1/answers", { method: "POST", body: { keys, format } });
    const link = element("a", { href: URL.createObjectURL(await response.blob()), download: `answers.${format}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    say("told", `${counted(keys.length, "answer", "answers")} in answers.${format}.`);
  } catch (trouble) {
    say("told", `No file was made. ${trouble.message}`);
  }
}

// ---- the operator's part

const OUTCOMES = {
  answer: "answered", confidence: "not confident", fairness: "fairness gate", free: "refused before the vote",
  open: "open",
};
const LEVELS = { now: ["Now", "bad"], soon: ["Soon", "soon"], ok: ["Fine", "ok"] };

function showOverview(seen) {
  byId("operator").hidden = false;
  const told = seen.advice.map(({ level, words }) =>
    element("li", { class: LEVELS[level][1] }, element("strong", {}, `${LEVELS[level][0]}: `), words));
  const said = told.map((item) => item.textContent).join("");
  if (byId("advice").textContent !== said) byId("advice").replaceChildren(...told); // read out once, when it changes
  say("forecast", seen.forecast);
  showBurnDown(seen);
  showOutcomes(seen);
  showCosts(seen.costs);
  showFacts(seen);
}

function showBurnDown({ points, queries_left: left, lasts_s: lasts, at_s: now }) {
  if (left === null || points.length < 2) return byId("burn-down").replaceChildren();
  const total = points.at(-1).charges + left;
  const before = points.map((point) => [point.at_s, total - point.charges]);
  const from = points[0].at_s, to = lasts === null ? now : now + Math.min(lasts, Math.max(now - from, 60));
  const ahead = lasts === null ? [] : [[now, left], [to, lasts ? left * (1 - (to - now) / lasts) : 0]];
  const dashed = ahead.length ? " Dashed: forecast at the present rate." : "";
  const words = `Queries left: ${count(before[0][1])} at the start of this line, ${count(left)} now.${dashed}`;
  const top = Math.max(...before.map(([, value]) => value));
  return byId("burn-down").replaceChildren(
    chart(words, [{ kind: "", points: before }, { kind: "ahead", points: ahead }], { from, to, top, widest: 960 }));
}

function showOutcomes({ points, groups, callers }) {
  const from = points[0].at_s, to = points.at(-1).at_s;
  const top = Math.max(1, ...points.at(-1).answered, ...points.at(-1).refused);
  const charts = groups.map((group, g) => {
    const answered = points.map((point) => [point.at_s, point.answered[g]]);
    const refused = points.map((point) => [point.at_s, point.refused[g]]);
    const [yes, no] = [answered, refused].map((line) => count(line.at(-1)[1]));
    const words = `${group.group}: ${yes} answered (line), ${no} refused (dotted).`;
    const lines = [{ kind: "", points: answered }, { kind: "refused", points: refused }];
    return chart(words, lines, { from, to, top, widest: 440 });
  });
  byId("outcomes").replaceChildren(element("div", { class: "charts" }, ...charts));
  const head = [about.attribute, ...Object.values(OUTCOMES), ...statement.label_names.map((name) => `as ${name}`)];
  const spenders = callers.map(({ name, queries: spent }) => [name, spent]);
  byId("callers").replaceChildren(table(["caller", "queries"], spenders));
  byId("groups").replaceChildren(table(head, groups.map((group) =>
    [group.group, group.answer, group.confidence, group.fairness, group.free, group.open, ...group.answers])));
}

// The data-dependent cost of queries, and the most expensive ones, as in the operator's report.
function showCosts({ words, bins, dearest, order }) {
  say("costs-words", words);
  if (!bins.length) return [byId("costs"), byId("dearest")].forEach((place) => place.replaceChildren());
  const step = 100 / bins.length, most = Math.max(...bins);
  const said = `Queries by cost, from 0 to 100 % of the worst case (Rényi, order ${Number(order.toPrecision(3))}); the highest bar is ${count(most)}.`;
  byId("costs").replaceChildren(bars(said, bins, (i) => `${Math.round(i * step)} to ${Math.round((i + 1) * step)} %`));
  const percent = (share) => `${Math.round(100 * share)}\u00a0%`;
  const head = ["query", about.attribute, "outcome", "votes", "of its worst case", "of the cost", "caller", "when"];
  return byId("dearest").replaceChildren(element("h4", {}, "Largest charges"), table(head, dearest.map((each) => [
    each.number, each.group, OUTCOMES[each.verdict], each.votes.map(count).join("\u00a0:\u00a0"), percent(each.of_worst),
    percent(each.of_total), each.caller || "the run itself", each.at_s ? time(each.at_s) : "not recorded",
  ])));
}

function showFacts(seen) {
  const { latency, chain } = seen, { reasons } = seen.health;
  const ms = (value) => `${Math.round(value)} ms`;
  const most = `99 % within ${ms(latency.p99_ms)}, of the last ${count(latency.count)}`;
  const room = seen.disk_free_bytes === null ? "not known" : `${count(Math.round(seen.disk_free_bytes / 1e6))} MB`;
  const verified = `${counted(chain.entries, "entry", "entries")} verified at ${time(chain.at_s)}`;
  describe("facts", [
    ["Voters", reasons.includes("votes") ? "not all answer" : "all answer"],
    ["Ledger", reasons.includes("ledger") ? "cannot be reached or written" : "is written"],
    ["Latency of queries", latency.count ? `half within ${ms(latency.p50_ms)}, ${most}` : "no query was asked yet"],
    ["Open reservations", count(seen.open_reservations)],
    ["Room on the disk", room],
    ["Last backup", seen.last_backup_s === null ? "none is known" : time(seen.last_backup_s)],
    ["Chain of the ledger", chain.fault || verified],
    ["Data-dependent ε", `${decimal(seen.epsilon_data_dependent)} (not to be published)`],
    ["Started", time(seen.started_s)],
  ]);
}

async function act(path, place, words) {
  say(place, "Working.");
  try {
    say(place, words(await ask(path, { method: "POST" })));
  } catch (trouble) {
    say(place, trouble.message);
  }
}

// ---- the visit

function leave(text) {
  visit?.abort();
  sessionStorage.removeItem(TOKEN);
  sessionStorage.removeItem(ANSWERS);
  answers = [];
  byId("main").hidden = byId("operator").hidden = byId("forget").hidden = true;
  byId("entry").hidden = false;
  pulse("Not connected.");
  say("trouble", text);
  byId("token").focus();
  document.documentElement.dataset.drawn = 1;
}

async function enter() {
  visit?.abort();
  visit = new AbortController();
  const { signal } = visit;
  for (let wait = FIRST_PAUSE_MS; !signal.aborted; wait = Math.min(2 * wait, LONGEST_PAUSE_MS)) {
    try {
      about = await ask("v1/about", { signal });
      [statement, me] = [await ask("v1/statement", { signal }), await ask("v1/me", { signal })];
      break;
    } catch (trouble) {
      if (trouble.status === 401) return leave("This token is wrong. Ask the operator for yours.");
      pulse(`${trouble.message} Trying again in ${Math.round(wait / 1000)} s.`);
      document.documentElement.dataset.drawn = 1;
      await pause(wait);
    }
  }
  if (signal.aborted) return null;
  say("trouble", "");
  byId("main").hidden = false;
  byId("entry").hidden = sessionStorage.getItem(TOKEN) !== null;
  byId("forget").hidden = !byId("entry").hidden;
  byId("main").focus();
  answers = JSON.parse(sessionStorage.getItem(ANSWERS) ?? "[]");
  showAbout();
  showAnswers();
  if (about.caller.role === "operator") follow("v1/operator/events", "v1/operator/overview", showOverview, signal);
  return follow("v1/events", "v1/state", showState, signal);
}

function choose() {
  for (const part of document.querySelectorAll("[data-kind]")) {
    part.hidden = !part.dataset.kind.split(" ").includes(kind());
    for (const input of part.querySelectorAll("input, select, textarea")) input.disabled = part.hidden;
  }
}

function begin() {
  let later = null;
  const needsToken = byId("access").dataset.needsToken === "true";
  byId("access").hidden = !needsToken;
  byId("access").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.removeItem(ANSWERS);
    sessionStorage.setItem(TOKEN, byId("token").value.trim());
    byId("token").value = "";
    byId("operator").hidden = true;
    enter();
  });
  byId("forget").addEventListener("click", () => leave(""));
  byId("ask").addEventListener("submit", submit);
  byId("ask").addEventListener("input", () => {
    choose();
    clearTimeout(later);
    later = setTimeout(showCost, 300);
  });
  byId("look-up").addEventListener("submit", lookUp);
  for (const button of document.querySelectorAll("[data-format]")) button.addEventListener("click", download);
  byId("verify").addEventListener("click", () => act("v1/operator/verification", "verified", ({ fault, entries }) =>
    fault || `${counted(entries, "entry holds", "entries hold")}.`));
  choose();
  if (needsToken && !sessionStorage.getItem(TOKEN)) leave("");
  else enter();
}

begin();
