// The operations page: asks for the fleet's numbers every two seconds and shows them. Names of adapters are
// only ever set as text.

import { StackedChart } from "./charts.js";

const PERIOD_MS = 2000;
const TIERS = ["hbm", "host", "disk", "source"];
const OWNERS = ["kv", "prefix", "adapters", "free"];
const MEANING = {
  hbm: "in device memory", host: "in host memory", disk: "on disk", source: "at the source only", loading: "loading",
};
const LETTER = { hbm: "M", host: "H", disk: "D", source: "S", loading: "L" };

const byId = (id) => document.getElementById(id);
const query = { search: "", sort: "hot", page: 0 };
let key = sessionStorage.getItem("lorafleet-key") ?? "";
let before = null; // the last answer
let rates = new Map(); // adapter -> requests a second

const pool = new StackedChart(byId("pool-chart"), OWNERS, whole);
const lookups = new StackedChart(byId("lookup-chart"), TIERS, (value) => value.toFixed(1));

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (value >= 1024 && i < units.length - 1) { value /= 1024; i += 1; }
  return `${value.toFixed(value < 10 && i ? 1 : 0)} ${units[i]}`;
}

function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

function percent(share) {
  return share == null || !Number.isFinite(share) ? "–" : `${(share * 100).toFixed(1)} %`;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

/** Parts of a whole: {name: number}, each name being a class with a colour. */
function bar(parts, names, meaning) {
  const total = sum(names.map((name) => parts[name] ?? 0));
  const made = element("div", "bar");
  const said = [];
  for (const name of names) {
    const value = parts[name] ?? 0;
    if (!value) continue;
    const part = element("span", name);
    part.style.flexGrow = value;
    made.append(part);
    said.push(`${whole(value)} ${meaning[name] ?? name} (${percent(value / total)})`);
  }
  made.title = said.join(", ") || "nothing yet";
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", made.title);
  return made;
}

function row(heading, cells) {
  const made = element("tr");
  const first = element("th", "", heading);
  first.scope = "row";
  first.title = heading;
  made.append(first);
  for (const cell of cells) {
    const td = element("td");
    td.append(cell);
    made.append(td);
  }
  return made;
}

function tile(name, value, beside = "") {
  const made = element("dl", "tile");
  const dd = element("dd", "", value);
  if (beside) dd.append(" ", element("small", "", beside));
  made.append(element("dt", "", name), dd);
  return made;
}

function showTiles(data, change) {
  const { totals, replicas } = data;
  const seats = sum(replicas.map((replica) => replica.seats));
  const found = change ? change.lookups : totals.lookups;
  const asked = sum(Object.values(found));
  const firsts = change?.firstTokens ? change.firstTokenS / change.firstTokens : totals.first_token_s / totals.first_tokens;
  byId("tiles").replaceChildren(
    tile("Replicas", whole(replicas.length)),
    tile("Running", whole(sum(replicas.map((r) => r.running))), `of ${whole(seats)} seats`),
    tile("Waiting", whole(sum(replicas.map((r) => r.waiting)))),
    tile("Requests", change ? change.requests.toFixed(1) : "–", "a second"),
    tile("Output", change ? whole(change.tokens) : "–", "tokens a second"),
    tile("Hits", asked ? percent(1 - found.source / asked) : percent(1 - totals.lookups.source / sum(Object.values(totals.lookups))), change && asked ? "now" : "in all"),
    tile("First token", seconds(firsts), "mean"),
    tile("Adapters", whole(totals.resident), `of ${whole(totals.adapters)} resident`),
  );
}

function showReplicas(data) {
  byId("replicas").tBodies[0].replaceChildren(...data.replicas.map((replica, i) => row(`${i + 1}  ${replica.id}`, [
    `${whole(replica.running)} of ${whole(replica.seats)}`,
    whole(replica.waiting),
    bar(replica.pages, OWNERS, {}),
    `${whole(replica.slots.used)} of ${whole(replica.slots.total)}`,
    `${bytes(replica.host_bytes.used)} of ${bytes(replica.host_bytes.total)}`,
    whole(replica.ranks),
    whole(replica.preemptions),
  ])));
}

function residency(tiers) {
  const made = element("div", "cells");
  tiers.forEach((tier, i) => {
    const cell = element("span", tier ? `cell ${tier}` : "cell", LETTER[tier] ?? "");
    cell.title = `replica ${i + 1}: ${tier ? MEANING[tier] : "not here"}`;
    cell.setAttribute("role", "img");
    cell.setAttribute("aria-label", cell.title);
    made.append(cell);
  });
  return made;
}

function showAdapters(data) {
  const { rows, matching, page, num_pages: pages } = data.adapters;
  byId("adapters").tBodies[0].replaceChildren(...rows.map((one) => row(one.name + (one.pinned ? " (pinned)" : ""), [
    residency(one.tiers),
    bar(one.lookups, TIERS, MEANING),
    percent(one.hit_ratio),
    whole(one.requests),
    rates.has(one.name) ? rates.get(one.name).toFixed(1) : "–",
    `${whole(one.running)} run, ${whole(one.waiting)} wait`,
    one.loads ? `${seconds(one.load_s / one.loads)} (${whole(one.loads)})` : "–",
    seconds(one.blocked_s),
    whole(one.evictions),
    whole(one.errors),
  ])));
  query.page = page;
  byId("matching").textContent = `${whole(matching)} of ${whole(data.totals.adapters)}`;
  byId("page").textContent = ` ${page + 1} of ${pages} `;
  byId("previous").disabled = page === 0;
  byId("next").disabled = page + 1 >= pages;
}

/** What happened between two answers, a second; null if there were not two, or a replica came or went. */
function changes(data) {
  if (!before) return null;
  const ids = (answer) => answer.replicas.map((replica) => replica.id).join();
  const passed = data.at_s - before.at_s;
  if (passed <= 0 || ids(before) !== ids(data)) return null;
  const of = (read) => Math.max(0, read(data.totals) - read(before.totals)) / passed;
  const old = new Map(before.adapters.rows.map((one) => [one.name, one.requests]));
  rates = new Map(data.adapters.rows.filter((one) => old.has(one.name)).map(
    (one) => [one.name, Math.max(0, one.requests - old.get(one.name)) / passed],
  ));
  return {
    requests: of((t) => t.requests),
    tokens: of((t) => t.output_tokens),
    firstTokens: of((t) => t.first_tokens),
    firstTokenS: of((t) => t.first_token_s),
    lookups: Object.fromEntries(TIERS.map((tier) => [tier, of((t) => t.lookups[tier])])),
  };
}

function show(data) {
  const isNew = !before || data.at_s > before.at_s;
  const change = changes(data);
  byId("model").textContent = data.model;
  if (isNew) {
    const owners = Object.fromEntries(OWNERS.map((owner) => [owner, sum(data.replicas.map((r) => r.pages[owner] ?? 0))]));
    pool.add(Date.now() / 1000, owners);
    if (change) lookups.add(Date.now() / 1000, change.lookups);
    showTiles(data, change);
  }
  showReplicas(data);
  showAdapters(data);
  if (isNew) before = data;
}

async function ask() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`/dashboard/data?${new URLSearchParams(query)}`, { headers });
  byId("key-form").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "an API key is needed" : `the server answers ${answer.status}`);
  show(await answer.json());
}

async function refresh() {
  try {
    await ask();
    byId("state").textContent = `live, ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    byId("state").textContent = error.message;
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const chart of [pool, lookups]) if (chart.chart) chart.draw();
}

function listen() {
  let typing;
  byId("search").addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => { query.search = event.target.value; query.page = 0; refresh(); }, 200);
  });
  byId("sort").addEventListener("change", (event) => { query.sort = event.target.value; query.page = 0; refresh(); });
  byId("previous").addEventListener("click", () => { query.page -= 1; refresh(); });
  byId("next").addEventListener("click", () => { query.page += 1; refresh(); });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = byId("key").value;
    sessionStorage.setItem("lorafleet-key", key);
    refresh();
  });
  byId("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
}

function showLegend() {
  for (const name of [...TIERS, "loading"]) byId("legend").append(element("i", name, LETTER[name]), MEANING[name]);
}

const wanted = new URLSearchParams(location.search).get("theme");
setTheme(wanted ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
showLegend();
listen();
refresh();
setInterval(() => { if (!document.hidden) refresh(); }, PERIOD_MS);
