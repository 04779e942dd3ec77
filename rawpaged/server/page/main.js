// Reads /metrics and, where it may, /kv once a second, and keeps the page up to date.

import { byId, setText } from "./elements.js";
import { History } from "./history.js";
import { isRestart, readSample, showServer, showSlots, showStrip, showTotals } from "./numbers.js";
import { HttpStatus, Poll, get } from "./poll.js";
import { Pool } from "./pool.js";
import { parse } from "./prometheus.js";
import { Tiles } from "./tiles.js";
import { WINDOW } from "./window.js";

const KEY = "rawpaged-api-key"; // in this tab's session storage
const MESSAGE_TIME = 30_000; // milliseconds that good news stay

const tiles = new Tiles(byId("tiles"));
const pool = new Pool(() => mapPoll.now());
const metricsPoll = new Poll(readMetrics, lose);
const mapPoll = new Poll(readMap, onMapFailure);
let history = new History();
let server = null; // what page/server.json said
let lostSince = null; // a time of day, while there are no answers
let isHeld = false;
let isKeyWrong = false;
let messageTimer;

async function readMetrics() {
  const text = await (await get("metrics", null)).text();
  const sample = readSample(parse(text), performance.now() / 1000);
  const isNew = history.last === undefined || isRestart(history.last, sample);
  if (isNew || lostSince !== null) await readServer();
  history.add(sample);
  showServer(server.model, sample.limits);
  showState();
  tiles.update(history);
  showStrip(history);
  showSlots(sample);
  showTotals(sample);
}

/** What the server is; a restarted one has another history, and maybe other flags. */
async function readServer() {
  const answer = await (await get("page/server.json", null)).json();
  if (server !== null && answer.started !== server.started) {
    history = new History();
    say(`The server was restarted at ${clock(new Date(1000 * answer.started))}.`, MESSAGE_TIME);
  } else if (lostSince !== null) {
    say(`The server answers again, after none since ${lostSince}.`, MESSAGE_TIME);
  }
  server = answer;
  lostSince = null;
  showMapPart();
}

async function readMap() {
  const query = `first_block=${pool.window.firstBlock}&num_blocks=${WINDOW}`;
  const map = await (await get(`kv?${query}`, sessionStorage.getItem(KEY))).json();
  // The answer to an earlier question may come after the window was moved.
  if (map.first_block === pool.window.firstBlock) pool.update(map);
}

function onMapFailure(error) {
  if (!(error instanceof HttpStatus)) return; // the other poll tells of it
  if (error.status === 401) {
    sessionStorage.removeItem(KEY);
    isKeyWrong = true;
    showMapPart();
  } else if (error.status === 400) {
    pool.window.firstBlock = 0; // the pool of a restarted server may be smaller
  }
}

function lose() {
  lostSince ??= clock(new Date());
  say(`No answer from the server since ${lostSince}. Trying again every few seconds.`);
  showState();
}

/** The map, or what it takes to see it. */
function showMapPart() {
  const needsKey = server.kv && server.api_key && sessionStorage.getItem(KEY) === null;
  byId("off").hidden = server.kv;
  byId("key-form").hidden = !needsKey;
  byId("map").hidden = byId("requests-section").hidden = byId("inspector").hidden =
    !server.kv || needsKey;
  if (isKeyWrong) setText(byId("key-text"), "The server does not take this key. Try another.");
  if (server.kv && !needsKey && metricsPoll.isOn) mapPoll.start();
  else mapPoll.stop();
}

function showState() {
  const [state, text] = stateNow();
  byId("state").dataset.state = state;
  setText(byId("state-text"), text);
}

function stateNow() {
  if (lostSince !== null) return ["lost", "no answer"];
  if (isHeld) return ["held", "held"];
  if (history.last === undefined) return ["wait", "waiting for the server"];
  return history.last.running > 0 ? ["run", "running"] : ["idle", "idle"];
}

function say(text, time = null) {
  clearTimeout(messageTimer);
  setText(byId("message"), text);
  byId("message").hidden = false;
  if (time !== null) messageTimer = setTimeout(() => (byId("message").hidden = true), time);
}

function clock(date) {
  return date.toLocaleTimeString("en-GB");
}

/** Nobody looks at a hidden page, and a held one is to stay as it is. */
function startOrStop() {
  if (document.hidden || isHeld) {
    metricsPoll.stop();
    mapPoll.stop();
  } else {
    metricsPoll.start();
    if (server !== null) showMapPart();
  }
}

byId("hold").addEventListener("click", () => {
  isHeld = !isHeld;
  byId("hold").setAttribute("aria-pressed", String(isHeld));
  startOrStop();
  showState();
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  showMapPart();
});

document.addEventListener("visibilitychange", startOrStop);
startOrStop();
