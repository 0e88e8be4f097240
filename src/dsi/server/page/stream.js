// One request to the server, and the record of its response.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The record of a request. All times are the server's, in seconds since the request was admitted. */
export class Run {
  constructor(algorithm, prompt) {
    this.algorithm = algorithm;
    this.prompt = prompt;
    this.id = "";
    this.text = "";
    this.tokens = []; // {text, how, at, alternatives}
    this.decisions = []; // {at, tokens, way, cause, ...}, of auto
    this.lanes = new Map(); // server -> {name, role, spans, marks, alive, restarts}
    this.curve = [{ t: 0, root: 0, tip: 0 }];
    this.now = 0;
    this.lastChunk = 0; // when it arrived, by the page's clock
    this.finish = null;
    this.metrics = null;
  }

  get end() {
    return Math.max(this.metrics?.timing?.elapsed_s ?? this.now, this.tokens.at(-1)?.at ?? 0);
  }

  get lost() {
    return [...this.lanes.values()].flatMap((lane) => lane.marks.map((mark) => ({ ...mark, name: lane.name })));
  }

  /** The time now, by the page's clock since the last chunk. */
  clock() {
    return this.finish ? this.end : this.now + (this.lastChunk ? (performance.now() - this.lastChunk) / 1000 : 0);
  }

  /** The number of verified tokens at a time (root), and of verified and draft tokens (tip). */
  at(t) {
    const verified = upTo(this.tokens, t, (token) => token.at);
    const point = this.curve[Math.max(0, upTo(this.curve, t, (p) => p.t) - 1)];
    return { root: verified, tip: Math.max(verified, point.tip) };
  }

  servers(list) {
    for (const { name, role, alive, restarts } of list) {
      const lane = this.lane(name, role);
      if (lane.alive !== undefined) {
        if (lane.alive && !alive) lane.marks.push({ t: this.now, kind: "lost" });
        else if (!lane.alive && alive) lane.marks.push({ t: this.now, kind: "back" });
        else if (restarts > lane.restarts) lane.marks.push({ t: this.now, kind: "replaced" }); // at once
      }
      Object.assign(lane, { alive, restarts });
    }
  }

  lane(name, role) {
    if (!this.lanes.has(name)) this.lanes.set(name, { name, role, spans: [], marks: [] });
    return this.lanes.get(name);
  }

  /** Drafters first, then targets, each by name. */
  sorted() {
    const lanes = [...this.lanes.values()];
    const rank = (lane) => (lane.role === "target" ? 1 : 0);
    return lanes.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
  }

  addChunk(chunk) {
    this.id = chunk.id ?? this.id;
    this.lastChunk = performance.now();
    const choice = chunk.choices?.[0];
    const trace = chunk.trace;
    this.text += choice?.text ?? "";
    if (trace) {
      this.now = Math.max(this.now, trace.now ?? 0);
      if (trace.servers) this.servers(trace.servers);
      for (const span of trace.spans ?? []) {
        const { spans } = this.lane(span.server, span.role);
        spans.push(span);
        if (spans.length > 1 && spans.at(-2).end > span.end) spans.sort((a, b) => a.end - b.end);
        this.now = Math.max(this.now, span.end);
      }
      this.extendCurve(trace);
      this.decisions.push(...(trace.decisions ?? []));
      for (const token of trace.tokens ?? []) this.tokens.push(token);
      const last = this.curve.at(-1);
      this.curve.push({ t: Math.max(last.t, trace.now ?? 0), root: trace.root ?? last.root, tip: trace.tip ?? last.tip });
    } else if (choice?.text) {
      this.tokens.push({ text: choice.text, how: "plain", at: this.now });
    }
    if (chunk.metrics) this.metrics = chunk.metrics;
    if (choice?.finish_reason) this.finish = choice.finish_reason;
  }

  /** Root and tip between two chunks: each token advances the root, each draft the tip, and a correction resets it. */
  extendCurve({ tokens = [], spans = [] }) {
    const drafts = spans.filter(({ kind, stale }) => kind === "draft" && !stale);
    const moves = [...tokens.map(({ at, how }) => ({ t: at, how })), ...drafts.map(({ end, to }) => ({ t: end, to }))];
    for (const { t, how, to } of moves.sort((a, b) => a.t - b.t)) {
      const last = this.curve.at(-1);
      const root = last.root + (how ? 1 : 0);
      const tip = how === "corrected" ? root : Math.max(root, how ? last.tip : to + 1);
      this.curve.push({ t: Math.max(last.t, t), root, tip });
    }
  }
}

/** How many of a sorted list come at or before t. */
export function upTo(list, t, time) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (time(list[middle]) <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function errorOf(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message || message;
  } catch { /* not an error object */ }
  return new ServerError(message, response.status);
}

export async function get(path, key, signal) {
  const response = await fetchOrFail(path, { headers: headers(key), signal });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function fetchOrFail(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
}

/** Send a request and record the response in `run`; `onChunk` is called as chunks arrive. */
export async function stream(body, run, { key, signal, onChunk }) {
  const response = await fetchOrFail("v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.message ?? "The server failed.");
        run.addChunk(chunk);
      }
      onChunk();
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server broke.");
  } finally {
    onChunk();
  }
  if (!run.finish) throw new ServerError("The answer ended before it was finished.");
}
