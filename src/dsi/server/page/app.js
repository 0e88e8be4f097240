// The page: settings, one request as it runs, and the race.

import { Run, get, stream } from "./stream.js";
import { Text, Tip, duration, element } from "./tokens.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const TITLES = { nonsi: "non-SI", si: "SI", dsi: "DSI", pearl: "PEARL", auto: "auto" };
const RACERS = ["nonsi", "si", "dsi"];
const SPEEDS = [["1", "1×"], ["0.5", "1/2"], ["0.25", "1/4"], ["0.1", "1/10"]];
const still = matchMedia("(prefers-reduced-motion: reduce)");
const seconds = (s) => `${s.toFixed(s < 9.9995 ? 3 : 2)} s`;
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
const many = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

const tip = new Tip($("tip"));
const text = new Text($("text"), tip, { pointed: (token) => cross(token) });
const timeline = new Timeline($("timeline"), (where) => point(timeline, where, text));
const raceline = new Timeline($("race-timeline"), (where) => point(raceline, where, null), { single: false });

let model = null;
let fleet = []; // the servers, as last reported
let run = null; // the one request on the page
let race = null; // {runs, columns}
let busy = null; // the AbortController of the running request or race
let zoomed = false; // the view is the reader's own

// ---------------------------------------------------------------- the replay

class Player {
  constructor(node, name, show) {
    this.node = node;
    this.show = show; // called with a time, or with null for the end
    this.t = 0;
    this.end = 0;
    this.speed = 1;
    this.playing = false;
    this.button = element("button", { type: "button", class: "quiet play" });
    this.slider = element("input", { type: "range", min: "0", max: "1000", value: "1000", "aria-label": "Time of the replay" });
    this.clock = element("span", { class: "clock", "aria-hidden": "true" }); // the slider says it
    const speeds = element("fieldset", { class: "choice small" }, element("legend", { class: "vh" }, "Pace of the replay"));
    for (const [value, title] of SPEEDS) {
      const input = element("input", { type: "radio", name, value, "aria-label": `${title} of the true pace` });
      input.checked = value === "1";
      input.addEventListener("change", () => {
        this.speed = Number(value);
        if (!this.playing) this.play();
      });
      speeds.append(element("label", {}, input, element("span", { "aria-hidden": "true" }, title)));
    }
    node.replaceChildren(this.button, this.slider, this.clock, speeds);
    this.button.addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    this.slider.addEventListener("input", () => {
      this.pause();
      this.seek((this.slider.value / 1000) * this.end);
    });
    this.update();
  }

  load(end) {
    this.end = end;
    this.node.hidden = false;
    this.playing = false;
    this.seek(end);
  }

  unload() {
    this.playing = false;
    this.node.hidden = true;
  }

  play(from = this.t >= this.end ? 0 : this.t) {
    this.t = from;
    this.playing = true;
    this.last = null;
    this.update();
    requestFrame();
  }

  pause() {
    this.playing = false;
    this.update();
  }

  tick(now) {
    if (!this.playing) return;
    const t = this.t + (this.last === null ? 0 : ((now - this.last) / 1000) * this.speed);
    this.last = now;
    if (t >= this.end) this.playing = false;
    this.seek(t);
  }

  seek(t) {
    this.t = Math.min(this.end, t);
    this.slider.value = this.end ? Math.round((this.t / this.end) * 1000) : 1000;
    this.update();
    this.show(this.t >= this.end ? null : this.t);
  }

  update() {
    this.button.textContent = this.playing ? "Pause" : this.t >= this.end ? "Replay" : "Play";
    this.button.dataset.icon = this.playing ? "pause" : "play";
    this.clock.textContent = seconds(this.t);
    this.slider.setAttribute("aria-valuetext", seconds(this.t));
  }
}

const player = new Player($("player"), "pace", (t) => showRun(t));
const racePlayer = new Player($("race-player"), "race-pace", (t) => showRace(t));

// ---------------------------------------------------------------- settings

function whole(id, least, what) {
  const field = $(id);
  if (field.validity.badInput) throw new Error(`${what}: a number is needed.`);
  if (field.value.trim() === "") return undefined;
  const value = Number(field.value);
  if (!Number.isInteger(value) || value < least) throw new Error(`${what} ${field.value}: must be a whole number, at least ${least}.`);
  return value;
}

function settings() {
  const temperature = Number($("temperature").value || 0);
  if ($("temperature").validity.badInput || temperature < 0) throw new Error("Temperature: a number is needed, at least 0.");
  return {
    prompt: $("prompt").value,
    algorithm: document.querySelector("input[name=algorithm]:checked").value,
    max_tokens: whole("max_tokens", 1, "Tokens") ?? 128,
    lookahead: whole("lookahead", 1, "Lookahead"),
    seed: whole("seed", 0, "Seed") ?? 0,
    temperature,
    rule: $("rule").value,
  };
}

/** The request's body; what is undefined is left out. */
function body({ algorithm, ...chosen }) {
  const alone = algorithm === "nonsi"; // no drafter: neither a lookahead nor a rule applies
  return {
    ...chosen,
    model,
    algorithm,
    lookahead: alone || algorithm === "auto" ? undefined : chosen.lookahead, // auto finds its own
    rule: alone ? undefined : chosen.rule,
    stream: true,
    logprobs: 3,
    trace: true,
  };
}

const key = () => $("key").value.trim();

function showSettings() {
  const parts = [`lookahead ${$("lookahead").value || "auto"}`, `temperature ${$("temperature").value || 0}`, `seed ${$("seed").value || 0}`, $("rule").value];
  $("settings-summary").textContent = parts.join(" · ");
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("more").setAttribute("aria-expanded", String(open));
}

function showError(error) {
  if (error.name === "AbortError") return;
  $("alert").textContent = error.message;
  if (error.status === 401) {
    openSettings(true);
    $("key").focus();
  }
}

async function loadServers() {
  try {
    const [models, health] = await Promise.all([get("v1/models", key()), get("health", key())]);
    model = (await models.json()).data[0].id;
    fleet = (await health.json()).servers ?? [];
    showServers();
    if (!run) empty();
    return true;
  } catch (error) {
    showError(error);
    return false;
  }
}

function showServers() {
  const count = (target) => fleet.filter(({ role }) => (role === "target") === target).length;
  $("model").textContent = [model, count(false) && many(count(false), "drafter"), count(true) && many(count(true), "target")].filter(Boolean).join(" · ");
  $("servers").replaceChildren(...fleet.map(({ name, role, alive, restarts }) => {
    const state = alive ? (restarts ? `restarted ${restarts === 1 ? "once" : `${restarts} times`}` : "ready") : "lost";
    return element("li", { class: `${role === "target" ? "target" : "drafter"} ${alive ? "" : "lost"}`, title: `${name}: ${state}` }, element("span", { class: "vh" }, `${name}: ${state}`));
  }));
}

// ---------------------------------------------------------------- one request

function busyWith(controller) {
  busy = controller;
  const [started, stopped] = [["generate", "race"], ["stop"]].map((ids) => ids.includes(document.activeElement?.id));
  $("generate").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  $("race").disabled = Boolean(controller);
  document.body.classList.toggle("busy", Boolean(controller));
  if (controller && started) $("stop").focus();
  if (!controller && stopped) $("generate").focus();
}

async function generate() {
  if (busy) return;
  const chosen = begin();
  if (!chosen) return;
  closeRace();
  const controller = new AbortController();
  busyWith(controller);
  run = new Run(chosen.algorithm, chosen.prompt);
  run.servers(fleet);
  zoomed = false;
  player.unload();
  $("intro").hidden = $("tools").hidden = true;
  $("text").setAttribute("aria-busy", "true");
  text.clear(chosen.prompt);
  timeline.groups = [{ title: TITLES[run.algorithm], run }];
  timeline.goal = 0;
  timeline.blank = false;
  timeline.head = null;
  $("status").textContent = $("summary").textContent = "waiting for the server";
  requestFrame();
  let failed = null;
  try {
    if (!model && !(await loadServers())) return;
    await stream(body(chosen), run, { key: key(), signal: controller.signal, onChunk: () => updateServers(run) });
  } catch (error) {
    failed = error;
    showError(error);
  } finally {
    busyWith(null);
    $("text").removeAttribute("aria-busy");
    finish(failed);
  }
}

/** The settings of a new request, or null and an error message. */
function begin() {
  $("alert").textContent = $("summary").textContent = "";
  tip.hide();
  try {
    return settings();
  } catch (error) {
    showError(error);
    return null;
  }
}

function finish(failed) {
  const n = run.tokens.length;
  const stopped = failed?.name === "AbortError";
  if (!run.finish) run.finish = stopped ? "stopped" : "failed";
  showRun(null);
  if (!n && failed) {
    $("status").textContent = stopped ? "stopped" : "";
    run = null;
    empty();
    return;
  }
  const speculation = run.metrics?.speculative_decoding;
  const how = [TITLES[run.algorithm], speculation?.lookahead && run.algorithm !== "nonsi" ? `lookahead ${speculation.lookahead}` : null].filter(Boolean);
  const took = `${many(n, "token")} in ${duration(run.end)}`;
  const lost = new Set(run.lost.map(({ name }) => name));
  if (lost.size) how.push(`${[...lost].join(", ")} lost on the way`);
  $("status").textContent = [...how, stopped ? `stopped after ${took}` : failed ? `broke off after ${took}` : took].join(" · ");
  $("summary").textContent = stopped
    ? `Stopped after ${took}.`
    : failed
      ? `Broke off after ${took}.`
      : `Finished: ${took}, ${$("f-speed").textContent} tokens per second. ${run.text}`;
  $("tools").hidden = false;
  document.querySelector(".zoom").hidden = false;
  $("trace").hidden = !run.id;
  $("trace").href = `v1/traces/${encodeURIComponent(run.id)}`;
  $("trace").download = `${run.id}.json`;
  updateServers(run);
  tabulate();
  if (run.end > 0) player.load(run.end);
}

/** Update the servers in the page's header from what a run reports. */
function updateServers(of) {
  const known = of.sorted().filter((lane) => lane.alive !== undefined);
  if (known.every((lane, i) => lane.alive === fleet[i]?.alive && lane.restarts === fleet[i].restarts)) return;
  fleet = known.map(({ name, role, alive, restarts }) => ({ name, role, alive, restarts }));
  showServers();
}

/** Show the request as it was at a time; null is all of it so far. */
function showRun(t) {
  if (!run) return;
  if (text.tokens.length < run.tokens.length) text.add(run.tokens.slice(text.tokens.length));
  const live = !run.finish;
  const now = t === null ? (live ? run.clock() : Infinity) : t;
  const { root, tip: drafted } = t === null ? { root: run.tokens.length, tip: run.curve.at(-1).tip } : run.at(t);
  text.reveal(root, t === null && !live ? 0 : drafted - root);
  if (live || t !== null) text.follow();
  if (live) {
    if (run.tokens.length) $("status").textContent = `${TITLES[run.algorithm]} · ${many(root, "token")}`;
  }
  timeline.head = live || t !== null ? Math.min(now, live ? now : run.end) : null;
  if (!zoomed) updateView(live);
  timeline.draw();
  $("single").querySelector(".k-lost").hidden = !run.lost.length;
  figures(root, Math.min(now, run.end), t === null && !live);
}

/** Move the view: all of a short or finished request, the last seconds of a running one. */
function updateView(live) {
  const clock = run.clock();
  let aim;
  if (!live) aim = [0, Math.max(run.end, 0.001) * 1.004];
  else {
    const widest = visibleSeconds();
    const t1 = Math.max(0.2, clock * 1.05);
    aim = t1 > widest ? [t1 - widest, t1] : [0, t1];
  }
  const view = timeline.view;
  const far = Math.abs(view[0] - aim[0]) + Math.abs(view[1] - aim[1]) > 0.002 * (aim[1] - aim[0]);
  if (still.matches || live || !far || player.playing) timeline.view = aim;
  else {
    timeline.view = [view[0] + (aim[0] - view[0]) * 0.2, view[1] + (aim[1] - view[1]) * 0.2];
    requestFrame();
  }
}

/** How many seconds of a running request are in view: about sixty verifications, and five seconds at most. */
function visibleSeconds() {
  const times = [];
  for (const lane of run.lanes.values()) for (const span of lane.spans.slice(-9)) if (span.kind === "verify") times.push(span.end - span.start);
  times.sort((a, b) => a - b);
  return Math.min(5, Math.max(0.6, 60 * (times[times.length >> 1] ?? 0.02)));
}

function put(id, value, note) {
  const node = $(id);
  node.textContent = value;
  node.classList.toggle("none", value === "–");
  const small = node.previousElementSibling.querySelector("small");
  if (small) small.textContent = note ?? "";
}

function figures(root, now, complete) {
  const counts = { accepted: 0, corrected: 0, plain: 0 };
  for (const token of run.tokens.slice(0, root)) counts[token.how] = (counts[token.how] ?? 0) + 1;
  for (const how of Object.keys(counts)) {
    const node = $("legend").querySelector(`.${how} b`);
    if (node) node.textContent = root ? counts[how] : "";
  }
  const speculation = complete ? run.metrics?.speculative_decoding : null;
  const timing = complete ? run.metrics?.timing : null;
  const speed = timing?.tokens_per_second ?? (now > 0 ? root / now : 0);
  put("f-speed", root ? speed.toFixed(speed < 99.5 ? 1 : 0) : "–");
  const first = timing?.ttft_s ?? run.tokens[0]?.at;
  put("f-ttft", root && first !== undefined ? duration(first) : "–");
  const speculates = run.algorithm !== "nonsi";
  const accepted = speculation?.num_accepted_draft_tokens ?? counts.accepted;
  const drafted = speculation?.num_draft_tokens ?? Math.max(accepted, drafts(now));
  const verified = accepted + counts.corrected;
  put("f-accepted", speculates ? share(accepted, drafted) : "–", speculates && verified ? `${accepted} of ${drafted}; ${share(accepted, verified)} of those verified` : "");
  const hidden = speculation?.target_forwards_hidden;
  put("f-hidden", speculation ? share(hidden, speculation.target_forwards) : "–", speculation?.target_forwards ? `${hidden} of ${speculation.target_forwards}` : "");
  const wasted = speculation?.num_wasted_draft_tokens;
  put("f-wasted", speculates && wasted !== undefined ? wasted.toLocaleString("en") : "–");
  against(Boolean(run.finish));
}

/** Draft tokens verified by a time: all but those beyond the root. */
function drafts(t) {
  const { root, tip: drafted } = run.at(t);
  let made = 0;
  for (const { role, spans } of run.lanes.values()) {
    if (role !== "target") for (const span of spans) made += span.kind === "draft" && !span.stale && span.end <= t;
  }
  return made - (drafted - root);
}

/** The request's time beside the server's estimates for other algorithms. */
function against(complete) {
  const estimated = complete ? run.metrics?.estimated : null;
  $("against").classList.toggle("none", !estimated);
  if (!estimated) return;
  const rows = [[run.algorithm, run.end, "measured"]];
  for (const [name, time] of [["si", estimated.si_s], ["nonsi", estimated.nonsi_s]]) if (time && name !== run.algorithm) rows.push([name, time, "estimated"]);
  const most = Math.max(...rows.map(([, time]) => time));
  $("against").querySelector("ul").replaceChildren(...rows.map(([name, time, label]) => {
    const bar = element("i", { "aria-hidden": "true" });
    bar.style.width = `${(100 * time) / most}%`;
    return element("li", { class: label }, element("span", {}, TITLES[name]), element("b", {}, duration(time)), element("small", {}, label), element("em", {}, bar));
  }));
}

function empty() {
  const blank = new Run("dsi", "");
  blank.servers(fleet);
  timeline.groups = fleet.length ? [{ title: "", run: blank }] : [];
  timeline.view = [0, 1];
  timeline.head = null;
  timeline.blank = true;
  timeline.draw();
  if (!text.tokens.length) text.clear("");
  $("intro").hidden = false;
  $("against").classList.add("none");
  document.querySelector(".zoom").hidden = true;
}

/** The timeline as text and table, for screen readers. */
function tabulate() {
  const lanes = run.sorted();
  const busyTime = (lane) => lane.spans.reduce((sum, span) => sum + span.end - span.start, 0);
  const lost = run.lost.map(({ name, kind, t }) => `${name} ${{ lost: "was lost", back: "came back", replaced: "was lost and replaced" }[kind]} at ${duration(t)}`);
  const sums = lanes.map((lane) => `${lane.name} ${many(lane.spans.length, "forward")}, busy ${share(busyTime(lane), run.end)}`);
  $("timeline").setAttribute("aria-label", `Timeline of every server over ${duration(run.end)}: ${[...sums, ...lost].join("; ")}. The table below has each forward.`);
  const details = document.querySelector("details.table");
  const fill = () => {
    if (!details.open || !run) return;
    const rows = lanes.flatMap((lane) => lane.spans).sort((a, b) => a.start - b.start);
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...["server", "what", "tokens", "start", "end"].map((title) => element("th", { scope: "col" }, title)))));
    table.append(element("tbody", {}, ...rows.map((span) => element("tr", {}, ...[span.server, what(span), places(span), duration(span.start), duration(span.end)].map((cell) => element("td", {}, cell))))));
    $("table").replaceChildren(element("p", {}, [...sums, ...lost].join("; ") + "."), table);
  };
  details.ontoggle = fill;
  fill();
}

const what = (span) => ({ draft: "drafting", verify: "verifying", warm: "prefill" }[span.kind] ?? span.kind) + (span.stale ? ", stale" : "") + sharing(span);
/** Other requests whose tokens the same forward computed. */
const sharing = ({ texts = 1 }) => (texts > 1 ? `, in one forward with ${many(texts - 1, "other text")}` : "");
const places = (span) => (span.from === span.to ? `${span.from + 1}` : `${span.from + 1} to ${span.to + 1}`);

// ---------------------------------------------------------------- pointing at things

/** A token is pointed at: mark when it was verified. */
function cross(token) {
  if (timeline.cursor === (token?.at ?? null)) return;
  timeline.cursor = token?.at ?? null;
  timeline.draw();
}

/** The timeline is pointed at: describe what is there, and mark its tokens. */
function point(line, where, tokens) {
  tokens?.mark();
  if (!where || dragging) return tip.hide(line);
  const { span, row, x, y, box, t } = where;
  const at = { left: x, right: x, top: span ? box.top + row.y : y, bottom: span ? box.top + row.y + row.height : y };
  if (span) {
    tokens?.mark(span.from, span.to);
    const verb = { draft: "drafts", verify: "verifies", warm: "reads ahead to" }[span.kind] ?? span.kind;
    const noun = span.from === span.to ? "token" : "tokens";
    tip.show(line, at,
      element("p", { class: `tip-head ${span.kind === "draft" ? "accepted" : "plain"}` }, element("b", {}, span.server), ` ${verb} ${noun} ${places(span)}`),
      element("p", { class: "tip-note" }, `${duration(span.start)} to ${duration(span.end)}, ${duration(span.end - span.start)}${span.stale ? ", stale" : ""}${sharing(span)}`));
    return;
  }
  const lines = line.groups.filter(({ run }) => run.tokens.length).map(({ title, run }) => {
    const now = run.at(Math.min(t, run.end));
    return element("p", { class: "tip-note" }, line.single ? `root ${now.root}, tip ${now.tip}, lead ${now.tip - now.root}` : `${title}: ${many(now.root, "token")}`);
  });
  const turn = line.single && line.turn(t);
  if (turn) lines.push(element("p", { class: "tip-note" }, `auto: ${turn.way} from token ${turn.tokens + 1} on (${turn.cause}; acceptance ${turn.acceptance.toFixed(2)})`));
  if (lines.length) tip.show(line, { ...at, top: at.top - 6, bottom: at.bottom + 6 }, element("p", { class: "tip-head" }, element("b", {}, duration(Math.max(0, t)))), ...lines);
  else tip.hide(line);
}

let dragging = null;

function zoom(factor, centre) {
  if (!run?.finish) return;
  const [t0, t1] = timeline.view;
  centre ??= (t0 + t1) / 2;
  const width = Math.min(run.end * 1.004, Math.max(0.005, (t1 - t0) * factor));
  pan(centre - ((centre - t0) / (t1 - t0)) * width, width);
}

function pan(t0, width) {
  const end = run.end * 1.004;
  t0 = Math.max(0, Math.min(end - width, t0));
  zoomed = width < end * 0.999;
  timeline.view = [t0, t0 + width];
  timeline.draw();
}

function handleZoom() {
  const canvas = $("timeline");
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      if (button.dataset.zoom === "fit") {
        zoomed = false;
        showRun(player.t < player.end ? player.t : null);
      } else zoom(button.dataset.zoom === "in" ? 0.5 : 2);
    });
  }
  canvas.addEventListener("wheel", (event) => {
    if (!run?.finish) return;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.004), timeline.time(event.clientX - canvas.getBoundingClientRect().left));
    } else if (zoomed && Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const width = timeline.view[1] - timeline.view[0];
      pan(timeline.view[0] + (event.deltaX / canvas.clientWidth) * width, width);
    }
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (zoomed && event.button === 0) dragging = { x: event.clientX, view: [...timeline.view] };
  });
  addEventListener("pointermove", (event) => {
    if (!dragging) return;
    const width = dragging.view[1] - dragging.view[0];
    pan(dragging.view[0] - ((event.clientX - dragging.x) / canvas.clientWidth) * width, width);
  });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => (dragging = null));
}

// ---------------------------------------------------------------- the race

function column(algorithm) {
  const time = element("b", { class: "clock" }, "–");
  const ratio = element("span", { class: "ratio" });
  const bar = element("i");
  const textNode = element("div", { class: "text small" });
  const node = element("section", { class: "column", "aria-label": TITLES[algorithm] }, element("div", { class: "top" }, element("h3", {}, TITLES[algorithm]), time, ratio), element("div", { class: "progress", "aria-hidden": "true" }, bar), textNode);
  return { algorithm, node, time, ratio, bar, text: new Text(textNode, tip, { label: `Tokens of ${TITLES[algorithm]}` }) };
}

async function startRace() {
  if (busy) return;
  const chosen = begin();
  if (!chosen) return;
  const controller = new AbortController();
  busyWith(controller);
  player.pause();
  racePlayer.unload();
  race = { columns: RACERS.map(column), runs: [], goal: chosen.max_tokens, done: false };
  $("columns").replaceChildren(...race.columns.map(({ node }) => node));
  $("single").hidden = true;
  $("races").hidden = false;
  $("back").hidden = $("verdict").hidden = true;
  for (const one of race.columns) one.text.clear(chosen.prompt);
  raceline.groups = [];
  raceline.goal = chosen.max_tokens;
  raceline.head = null;
  raceline.draw();
  $("race-status").textContent = $("summary").textContent = "waiting for the server";
  const shared = { ...chosen, rule: "match" }; // the one rule that gives one text under every algorithm
  const request = (algorithm, run, fields = {}) => stream(body({ ...shared, algorithm, ...fields }), run, { key: key(), signal: controller.signal, onChunk: () => updateServers(run) });
  try {
    if (!model && !(await loadServers())) throw new DOMException("", "AbortError");
    await request("dsi", new Run("dsi", chosen.prompt), { max_tokens: Math.min(4, chosen.max_tokens) });
    for (const one of race.columns) {
      one.run = new Run(one.algorithm, chosen.prompt);
      one.run.servers(fleet);
      race.runs.push(one.run);
      raceline.groups = race.columns.filter(({ run }) => run).map(({ algorithm, run }) => ({ title: TITLES[algorithm], run }));
      one.node.classList.add("running");
      $("race-status").textContent = `recording ${TITLES[one.algorithm]}`;
      requestFrame();
      await request(one.algorithm, one.run);
      one.node.classList.remove("running");
      showRace(null, true);
    }
    race.done = true;
  } catch (error) {
    showError(error);
  } finally {
    busyWith(null);
    $("back").hidden = false;
    finishRace();
  }
}

function finishRace() {
  for (const { node, run } of race.columns) {
    node.classList.remove("running");
    if (run && !run.finish) run.finish = "stopped";
  }
  if (!race.done) {
    showRace(null);
    $("race-status").textContent = "stopped";
    return;
  }
  const [first, ...others] = race.runs;
  const n = first.tokens.length;
  const same = others.every((other) => other.text === first.text && other.tokens.length === n && other.tokens.every((token, i) => token.text === first.tokens[i].text));
  const verdict = $("verdict");
  verdict.hidden = false;
  verdict.classList.toggle("bad", !same);
  const times = Object.fromEntries(race.runs.map((run) => [run.algorithm, run.end]));
  const apart = first.tokens.findIndex((token, i) => others.some((other) => other.tokens[i]?.text !== token.text));
  verdict.replaceChildren(
    element("b", {}, same ? "Same text, token for token. " : "The texts differ. "),
    same
      ? `All three wrote the same ${many(n, "token")}; DSI took ${seconds(times.dsi)}, SI ${seconds(times.si)}, non-SI ${seconds(times.nonsi)}.`
      : `They should be equal; the first difference is at token ${(apart < 0 ? n : apart) + 1}.`);
  $("race-status").textContent = `${many(n, "token")} each${$("rule").value === "match" ? "" : ", under the rule match: only it gives one text for all"}`;
  $("summary").textContent = verdict.textContent;
  $("race-timeline").setAttribute("aria-label", `Timelines of the race on one time axis: ${race.runs.map((run) => `${TITLES[run.algorithm]} ${seconds(run.end)}`).join(", ")}.`);
  race.goal = raceline.goal = n;
  for (const one of race.columns) one.text.add(one.run.tokens.slice(one.text.tokens.length));
  racePlayer.load(Math.max(...race.runs.map((run) => run.end)));
  if (!still.matches) racePlayer.play(0);
}

/** All runs of the race at one time; null is the end, or now. Drawing takes CPU time that the servers may need,
    so nothing is drawn while they are recorded. */
function showRace(t, drawn = false) {
  if (!race) return;
  let latest = 0;
  for (const { node, run, text: columnText, time, ratio, bar } of race.columns) {
    if (!run) continue;
    const live = !run.finish;
    const now = t === null ? run.clock() : Math.min(t, run.end);
    latest = Math.max(latest, run.clock());
    if (columnText.tokens.length < run.tokens.length) columnText.add(run.tokens.slice(columnText.tokens.length));
    const { root, tip: drafted } = live ? { root: run.tokens.length, tip: run.curve.at(-1).tip } : run.at(t === null ? Infinity : t);
    const over = !live && (t === null || t >= run.end);
    columnText.reveal(root, over ? 0 : drafted - root);
    if (live || racePlayer.playing) columnText.follow();
    time.textContent = run.lastChunk || !live ? seconds(now) : "–";
    bar.style.width = `${Math.min(100, (100 * root) / race.goal)}%`;
    node.classList.toggle("over", over);
    const rivals = race.done ? race.runs.slice(0, race.runs.indexOf(run)) : [];
    const ratios = [`${Math.round(root / (now || 1))} tokens/s`, ...rivals.map((other) => `${(other.end / run.end).toFixed(2)}× ${TITLES[other.algorithm]}`)];
    ratio.textContent = over && root ? ratios.join(" · ") : "";
  }
  if (busy && !drawn) return;
  raceline.view = [0, Math.max(0.1, latest) * 1.004];
  raceline.head = t;
  raceline.draw();
}

function closeRace() {
  racePlayer.unload();
  race = null;
  $("races").hidden = true;
  $("single").hidden = false;
}

// ---------------------------------------------------------------- animation frames

let frameRequested = false;

function requestFrame() {
  if (frameRequested) return;
  frameRequested = true;
  requestAnimationFrame(frame);
}

function frame(now) {
  frameRequested = false;
  player.tick(now);
  racePlayer.tick(now);
  if (busy) {
    const began = performance.now();
    if (race) showRace(null);
    else showRun(null);
    // The models may share this machine's cores: the page takes a small part of one, and draws less often if it is slow.
    setTimeout(() => setTimeout(requestFrame, Math.min(120, Math.max(race ? 100 : 40, 8 * (performance.now() - began)))));
  } else if (player.playing || racePlayer.playing) requestFrame();
  else if (!race && run && !zoomed) showRun(player.t < player.end ? player.t : null);
}

// ---------------------------------------------------------------- light and dark

const THEMES = ["system", "light", "dark"];

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").setAttribute("aria-label", `Colours: ${name === "system" ? "as the system" : name}`);
  $("theme").title = $("theme").getAttribute("aria-label");
  try {
    localStorage.setItem("dsi-theme", name);
  } catch { /* not kept */ }
  recolour();
}

function recolour() {
  for (const line of [timeline, raceline]) {
    line.readColours();
    line.draw();
  }
}

function stored(storage, name) {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

// ---------------------------------------------------------------- start

function initialize() {
  theme(THEMES.includes(stored(() => localStorage, "dsi-theme")) ? stored(() => localStorage, "dsi-theme") : "system");
  $("theme").addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const order = dark ? ["system", "light", "dark"] : ["system", "dark", "light"];
    theme(order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  if (/Mac|iPhone|iPad/.test(navigator.platform)) $("hint").textContent = "⌘ ↵";

  $("key").value = stored(() => sessionStorage, "dsi-key") ?? "";
  $("key").addEventListener("change", () => {
    try {
      sessionStorage.setItem("dsi-key", key());
    } catch { /* not kept */ }
    if (!model) loadServers();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("ask").addEventListener("input", showSettings);
  $("more").addEventListener("click", () => openSettings($("settings").hidden));
  $("stop").addEventListener("click", () => busy?.abort());
  $("race").addEventListener("click", startRace);
  $("back").addEventListener("click", () => {
    closeRace();
    showRun(null);
    timeline.draw();
    $("race").focus();
  });
  $("copy").hidden = !navigator.clipboard; // only where the page is trusted
  $("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(run.prompt + run.text);
    $("copy").textContent = "Copied";
    setTimeout(() => ($("copy").textContent = "Copy"), 1500);
  });
  $("trace").addEventListener("click", async (event) => {
    if (!key()) return; // a plain link does
    event.preventDefault();
    try {
      const url = URL.createObjectURL(await (await get($("trace").getAttribute("href"), key())).blob());
      element("a", { href: url, download: $("trace").download }).click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    } catch (error) {
      showError(error);
    }
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      generate();
    } else if (event.key === "Escape") {
      busy?.abort();
      tip.hide();
    }
  });
  handleZoom();
  showSettings();
  empty();
  loadServers();
}

initialize();
