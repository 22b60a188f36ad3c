// Asks for the state once a second, more often while something is going on (the server says so where nothing has changed), and hands it to the panels.

import { $, lasting } from "./dom.js";
import { Grid } from "./grid.js";
import { RankTable } from "./ranks.js";
import { IncidentDialog } from "./incident.js";
import { sections } from "./sections.js";
import { timeline } from "./timeline.js";
import * as panels from "./panels.js";

const EVERY_MS = 1000, BUSY_MS = 400, HIDDEN_MS = 10000, LOST_MS = 5000, PATIENCE_MS = 8000;
const SILENT_S = 60; // a run that is not over states its position every 15 s
const KEY = "ft-state-token";

let tag = null, timer = null, doc = null, answeredAt = 0, skewMs = 0, failures = 0;
let asking = false;

const grid = new Grid($("grid"));
window.ftGrid = grid; // for tests, and for who wants to script it
const table = new RankTable(grid);
const incident = new IncidentDialog(ask);

// A token may come behind the # of the address, which no server sees: #token=... It is kept in this tab.
const given = /^#token=(.+)$/.exec(location.hash);
if (given) {
  sessionStorage.setItem(KEY, decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname + location.search);
}

function ask(path, headers = {}) {
  const token = sessionStorage.getItem(KEY);
  return fetch(path, { headers: { ...headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) }, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
}

async function look() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  try {
    const answer = await ask("api/state", tag ? { "If-None-Match": tag } : {});
    if (answer.status === 401) return needToken();
    if (answer.status !== 200 && answer.status !== 304) throw new Error(`the server answers ${answer.status}`);
    $("token-form").hidden = true;
    failures = 0;
    answeredAt = Date.now();
    skewMs = Date.parse(answer.headers.get("Date")) - answeredAt || 0;
    if (answer.status === 200) {
      const next = await answer.json();
      tag = answer.headers.get("ETag");
      show(next);
    }
    said();
    plan(document.hidden ? HIDDEN_MS : isBusy() ? BUSY_MS : EVERY_MS);
  } catch (error) {
    failures += 1;
    said();
    plan(failures > 2 ? LOST_MS : EVERY_MS);
  } finally {
    asking = false;
  }
}

// Something is going on: ranks stand still, or a restart is under way.
const isBusy = () => Boolean(doc) && !doc.derived.outcome && (["ending", "paused"].includes(doc.derived.phase) || doc.derived.standing.length > 0 || (doc.derived.counts.starting ?? 0) > 0);

function plan(ms) {
  clearTimeout(timer);
  timer = setTimeout(look, ms);
}

function show(next) {
  doc = next;
  panels.head(doc);
  panels.latest(doc);
  panels.tiles(doc);
  panels.standing(doc.derived);
  grid.show(doc.derived);
  table.show(doc.derived);
  timeline(doc);
  sections(doc);
  panels.hardware(doc);
  panels.budgets(doc);
  panels.about(doc);
  document.body.dataset.shown = "yes";
}

// How fresh what is shown is: the server's word, not the state file's; how old that is, is said beside it.
function said() {
  const lost = failures > 0;
  const age = doc?.run && !doc.derived.outcome ? (Date.now() + skewMs - Date.parse(doc.run.written)) / 1000 : 0;
  const silent = age > SILENT_S;
  $("link").dataset.link = lost ? "lost" : (doc && !doc.derived.up) || silent ? "wait" : "live";
  if (lost) return ($("link-text").textContent = answeredAt ? `server not reached for ${lasting((Date.now() - answeredAt) / 1000)}` : "server not reached");
  if (!doc || !doc.derived.up) return ($("link-text").textContent = "no usable state file now");
  if (doc.derived.outcome) return ($("link-text").textContent = "the run is over");
  $("link-text").textContent = silent ? `live; no word of the launcher for ${lasting(age)}: it is gone, its store is away, or it cannot write here` : "live";
}

function needToken() {
  $("token-form").hidden = false;
  $("token-error").textContent = sessionStorage.getItem(KEY) ? "This token is not the server's." : "";
  $("link-text").textContent = "a token is needed";
  if (document.activeElement === document.body) $("token").focus();
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("token").value.trim());
  look();
});
window.addEventListener("resize", () => { if (doc) timeline(doc); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });

look().then(() => incident.follow());
