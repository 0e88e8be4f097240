// The timeline: one lane for each server, time to the right; above the lanes, root and tip of the text.

import { upTo } from "./stream.js";

const COLOURS = ["paper", "card", "ink", "soft", "line", "guess", "target", "fix", "lost", "on-target"];
const FONT = '"Helvetica Neue", Arial, "Liberation Sans", sans-serif';

export class Timeline {
  /** `groups`: [{title, run}]. The plot shows root, tip and lead of a single run, or the progress of several. */
  constructor(canvas, pointed, { single = true } = {}) {
    this.single = single;
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.groups = [];
    this.view = [0, 1];
    this.head = null; // the time up to which it is drawn
    this.cursor = null; // a time to mark
    this.over = null; // the span under the pointer
    this.blank = false; // nothing has run yet: each row explains what it will show
    this.pointed = pointed;
    this.readColours();
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.unpoint());
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  /** Read the colours of the current theme from the style sheet. */
  readColours() {
    const probe = document.createElement("span");
    document.body.append(probe);
    this.colour = {};
    for (const name of COLOURS) {
      probe.style.color = `var(--${name})`;
      this.colour[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    this.hatches = {};
  }

  hatch(name) {
    if (this.hatches[name]) return this.hatches[name];
    const size = 6, scale = this.scale, tile = document.createElement("canvas");
    tile.width = tile.height = size * scale;
    const pen = tile.getContext("2d");
    pen.scale(scale, scale);
    pen.strokeStyle = this.colour[name];
    pen.lineWidth = 1.1;
    pen.beginPath();
    for (const x of [-size, 0, size]) {
      pen.moveTo(x - 1, size + 1);
      pen.lineTo(x + size + 1, -1);
    }
    pen.stroke();
    const pattern = this.context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / scale));
    return (this.hatches[name] = pattern);
  }

  /** The rows and their positions for the current width. */
  layout() {
    const width = this.canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(this.canvas.parentElement).paddingLeft);
    const narrow = width < 620;
    const most = Math.max(0, ...this.groups.map((group) => this.lanes(group.run).length));
    const tall = this.single ? (most > 6 ? 18 : 26) : most > 4 ? 11 : 15;
    const gap = this.single ? 9 : 4;
    const rows = [];
    let y = 4;
    const row = (kind, height, after, more = {}) => {
      rows.push({ kind, y, height, ...more });
      y += height + after;
    };
    row("plot", this.single ? (narrow ? 96 : 120) : narrow ? 96 : 130, this.single ? 14 : 16);
    if (narrow && this.single) y += 12;
    if (this.single && this.groups[0]) row("lead", 30, 14, { run: this.groups[0].run });
    for (const group of this.groups) {
      if (!this.single) row("title", 16, 4, { group });
      for (const lane of this.lanes(group.run)) {
        if (narrow) y += this.single ? 12 : 0;
        row("lane", tall, gap, { lane, group });
      }
      if (!this.single) y += 10;
    }
    const bottom = y;
    return { width, height: bottom + 20, rows, bottom, narrow, left: narrow ? 0 : 84, right: narrow ? 6 : 70 };
  }

  /** One for each server; where several runs are shown, the many that did nothing in one share a lane. */
  lanes(run) {
    const all = run.sorted();
    const idle = all.filter((lane) => !lane.spans.length && !lane.marks.length);
    if (this.single || all.length < 5 || idle.length < 2) return all;
    return [...all.filter((lane) => !idle.includes(lane)), { name: `${idle.length} idle`, spans: [], marks: [] }];
  }

  x(t) {
    const { left, right, width } = this.place;
    return left + ((t - this.view[0]) / (this.view[1] - this.view[0])) * (width - left - right);
  }

  time(x) {
    const { left, right, width } = this.place;
    return this.view[0] + ((x - left) / (width - left - right)) * (this.view[1] - this.view[0]);
  }

  draw() {
    const place = (this.place = this.layout());
    if (place.width < 100) return; // not visible
    const { canvas, context: pen } = this;
    const scale = Math.max(1, devicePixelRatio || 1);
    if (scale !== this.scale) this.hatches = {};
    this.scale = scale;
    const [w, h] = [Math.round(place.width * scale), Math.round(place.height * scale)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.width = `${place.width}px`;
      canvas.style.height = `${place.height}px`;
    }
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, place.width, place.height);
    if (!this.blank) this.axis();
    for (const row of place.rows) this[row.kind](row);
    if (this.cursor !== null) this.rule(this.cursor, this.colour.fix, [2, 3]);
    if (this.head !== null && this.head < this.view[1]) this.rule(this.head, this.colour.ink, []);
  }

  label(text, x, y, { align = "left", size = 11, colour = this.colour.soft, weight = 400, halo = false } = {}) {
    const pen = this.context;
    pen.font = `${weight} ${size}px ${FONT}`;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    if (halo) {
      pen.strokeStyle = this.colour.card;
      pen.lineWidth = 4;
      pen.lineJoin = "round";
      pen.strokeText(text, x, y);
    }
    pen.fillStyle = colour;
    pen.fillText(text, x, y);
  }

  explain(text, row) {
    if (text) this.label(text, this.place.left + 12, row.y + row.height / 2, { size: this.place.narrow ? 11 : 13 });
  }

  line(x1, y1, x2, y2, colour, dash = [], thick = 1) {
    const pen = this.context;
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
    pen.setLineDash([]);
  }

  rule(t, colour, dash) {
    const x = Math.round(this.x(t)) + 0.5;
    const { left, width, right, bottom, rows } = this.place;
    if (x >= left && x <= width - right + 1) this.line(x, rows[0].y, x, bottom, colour, dash);
  }

  axis() {
    const { left, right, width, bottom, rows } = this.place;
    const room = width - left - right;
    const [t0, t1] = this.view;
    const step = nice((t1 - t0) / Math.max(2, room / 96));
    const small = step < 0.1 || t1 <= 1;
    for (let n = Math.ceil(t0 / step - 1e-9); n * step <= t1 + 1e-9; n++) {
      const t = n * step, x = Math.round(this.x(t)) + 0.5;
      this.line(x, rows[0].y, x, bottom, this.colour.line);
      const text = small ? `${+(t * 1000).toFixed(3)}` : `${+t.toFixed(3)}`;
      const end = x > left + room - 30;
      this.label(n === 0 ? "0" : `${text} ${small ? "ms" : "s"}`, n === 0 ? x - 1 : end ? Math.min(x, width - 16) : x, bottom + 11, { align: n === 0 ? "left" : "center" });
    }
  }

  /** Draw inside the picture's own rectangle only, and no later than the head. */
  clipped(row, draw, before = 0) {
    const pen = this.context;
    const { left, right, width } = this.place;
    const until = this.head === null ? width - right : Math.min(width - right, this.x(this.head));
    pen.save();
    pen.beginPath();
    pen.rect(left, row.y - 4 - before, Math.max(0, until - left) + 1, row.height + 8 + before);
    pen.clip();
    draw(pen);
    pen.restore();
  }

  /** The points of a curve that can be seen, and one on either side. */
  seen(curve) {
    const time = (point) => point.t;
    return curve.slice(Math.max(0, upTo(curve, this.view[0], time) - 1), upTo(curve, this.view[1], time) + 1);
  }

  steps(pen, points, value, last) {
    let previous = null;
    for (const point of points) {
      const x = this.x(point.t), y = value(point);
      if (previous === null) pen.moveTo(x, y);
      else {
        pen.lineTo(x, previous);
        pen.lineTo(x, y);
      }
      previous = y;
    }
    if (previous !== null) pen.lineTo(this.x(Math.max(last, points.at(-1).t)), previous);
  }

  plot(row) {
    const pen = this.context, colour = this.colour;
    const { left, right, width, narrow } = this.place;
    const runs = this.groups.map((group) => group.run);
    const head = this.head ?? Infinity;
    const curves = runs.map((run) => this.seen(run.curve));
    let low = this.single && this.view[0] > 0 && curves[0]?.length ? curves[0][0].root : 0;
    let high = Math.max(this.single ? 8 : 0, ...curves.map((points) => points.reduce((most, point) => Math.max(most, point.tip, point.root), 0)));
    if (this.goal) high = Math.max(high, this.goal);
    if (high - low < 8) high = low + 8;
    const y = (value) => row.y + row.height - ((value - low) / (high - low)) * (row.height - 8);
    const step = Math.max(1, nice((high - low) / 2.6));
    if (this.blank) {
      this.line(left, row.y + row.height + 0.5, width - right, row.y + row.height + 0.5, colour.line);
      this.line(left + 0.5, row.y, left + 0.5, row.y + row.height, colour.line);
      if (!narrow) this.label("tokens", 0, row.y + row.height / 2);
      this.explain("How many tokens are verified, and how many guessed.", row);
      return;
    }
    for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
      const at = Math.round(y(value)) + 0.5;
      this.line(left, at, width - right, at, colour.line);
      if (runs.length && !(narrow && value === 0)) this.label(`${value}`, narrow ? 2 : left - 8, narrow ? at - 7 : at, { align: narrow ? "left" : "right" });
    }
    if (!narrow && runs.length) this.label("tokens", 0, row.y + row.height / 2 - 0.5, {});
    if (this.single && runs[0]) {
      const [run, points] = [runs[0], curves[0]];
      const last = Math.min(head, run.clock());
      this.clipped(row, () => {
        pen.globalAlpha = 0.16;
        pen.fillStyle = colour.guess;
        pen.beginPath();
        this.steps(pen, points, (point) => y(point.tip), last);
        const back = [...points].reverse();
        let after = this.x(Math.max(last, points.at(-1).t));
        for (const point of back) {
          pen.lineTo(after, y(point.root));
          after = this.x(point.t);
          pen.lineTo(after, y(point.root));
        }
        pen.fill();
        pen.globalAlpha = 1;
        for (const [name, thick, value] of [["guess", 1.25, (point) => y(point.tip)], ["ink", 1.75, (point) => y(point.root)]]) {
          pen.strokeStyle = colour[name];
          pen.lineWidth = thick;
          pen.beginPath();
          this.steps(pen, points, value, last);
          pen.stroke();
        }
        pen.fillStyle = colour.fix;
        const radius = Math.max(1.5, Math.min(2.6, 150 / (run.tokens.length / 4 + 1)));
        run.tokens.forEach((token, index) => {
          if (token.how !== "corrected" || token.at < this.view[0] || token.at > this.view[1]) return;
          pen.beginPath();
          pen.arc(this.x(token.at), y(index + 1), radius, 0, 7);
          pen.fill();
        });
      });
      for (const turn of run.decisions) this.decision(row, turn, head);
      if (run.tokens.length || run.curve.length > 1) {
        const now = run.at(Math.min(head, this.view[1]));
        const x = Math.min(this.x(Math.min(last, this.view[1])), width - right) + 7;
        const lead = now.tip - now.root;
        const apart = Math.min(0, y(now.root) - 14 - y(now.tip));
        if (!narrow) {
          this.label(`root ${now.root}`, x, y(now.root), { colour: colour.ink, weight: 600, halo: true });
          if (lead > 0) this.label(`tip ${now.tip}`, x, y(now.tip) + apart, { colour: colour.guess, weight: 600, halo: true });
        }
      }
    }
    if (!this.single) {
      const looks = [[colour.soft, 1.5, [4, 3]], [colour.target, 1.75, []], [colour.ink, 2.25, []]];
      const marks = [];
      this.groups.forEach((group, index) => {
        const run = group.run;
        if (!run.tokens.length) return;
        const [stroke, thick, dash] = looks[index % looks.length];
        const steps = [{ t: 0, n: 0 }, ...run.tokens.map((token, i) => ({ t: token.at, n: i + 1 }))];
        const last = Math.min(head, run.finish ? run.end : run.clock());
        this.clipped(row, () => {
          pen.strokeStyle = stroke;
          pen.lineWidth = thick;
          pen.setLineDash(dash);
          pen.beginPath();
          this.steps(pen, steps, (point) => y(point.n), last);
          pen.stroke();
          pen.setLineDash([]);
        });
        const done = run.at(last).root;
        const x = this.x(last);
        pen.fillStyle = stroke;
        pen.beginPath();
        pen.arc(x, y(done), 3, 0, 7);
        pen.fill();
        marks.push({ text: group.title, x, y: y(done), stroke });
      });
      for (const mark of marks) {
        const close = marks.some((other) => other.x > mark.x && other.x - mark.x < 44 && Math.abs(other.y - mark.y) < 12);
        this.label(mark.text, mark.x + (close ? -8 : 8), mark.y + (mark.y < row.y + 12 && !close ? 9 : 0), { align: close ? "right" : "left", colour: mark.stroke, weight: 600, halo: true });
      }
    }
  }

  /** Where auto took another way: a flag over the plot, empty where it gave up speculation. */
  decision(row, turn, head) {
    if (turn.at > head || turn.at < this.view[0] || turn.at > this.view[1]) return;
    const pen = this.context, x = Math.round(this.x(turn.at)) + 0.5, { colour } = this;
    this.line(x, row.y, x, row.y + row.height, colour.guess, [2, 3]);
    pen.fillStyle = turn.speculates ? colour.guess : colour.card;
    pen.strokeStyle = colour.guess;
    pen.lineWidth = 1.25;
    pen.beginPath();
    pen.rect(x, row.y, 8, 6);
    pen.fill();
    pen.stroke();
  }

  /** The way that auto went at a time. */
  turn(t) {
    return this.groups[0]?.run.decisions.findLast(({ at }) => at <= t) ?? null;
  }

  lead(row) {
    const pen = this.context, { colour } = this;
    const { left, narrow, right, width } = this.place;
    const points = this.seen(row.run.curve);
    const most = Math.max(0, ...points.map((point) => point.tip - point.root));
    const y = (value) => row.y + row.height - (value / Math.max(4, most)) * row.height;
    const last = Math.min(this.head ?? Infinity, row.run.clock());
    this.line(left, row.y + row.height + 0.5, width - right, row.y + row.height + 0.5, colour.line);
    this.clipped(row, () => {
      pen.fillStyle = colour.guess;
      pen.globalAlpha = 0.32;
      pen.beginPath();
      this.steps(pen, points, (point) => y(Math.max(0, point.tip - point.root)), last);
      pen.lineTo(this.x(Math.max(last, points.at(-1).t)), y(0));
      pen.lineTo(this.x(points[0].t), y(0));
      pen.fill();
      pen.globalAlpha = 1;
    });
    this.label(narrow ? "the drafter’s lead" : "lead", narrow ? 2 : 0, narrow ? row.y - 8 : row.y + row.height / 2, { halo: narrow });
    if (this.blank) this.explain("How far the guesses are ahead.", row);
    const now = row.run.at(Math.min(this.head ?? Infinity, this.view[1]));
    if (!narrow && most > 0) {
      const x = Math.min(this.x(Math.min(last, this.view[1])), width - right) + 7;
      this.label(this.head === null && row.run.finish ? `${most} at most` : `${now.tip - now.root}`, x, row.y + row.height / 2, { colour: colour.guess, weight: 600 });
    }
  }

  title(row) {
    this.label(row.group.title, 0, row.y + 8, { size: 12, weight: 700, colour: this.colour.ink });
  }

  lane(row) {
    const { colour } = this;
    const { left, right, width, narrow } = this.place;
    const { lane, group } = row;
    const [t0, t1] = this.view;
    this.box(left, row.y, width - right - left, row.height, colour.line, 3, 0.38);
    if (narrow && this.single) this.label(lane.name, 2, row.y - 7);
    else if (!narrow) this.label(lane.name, 0, row.y + row.height / 2, { size: this.single ? 12 : 10.5, colour: lane.alive === false ? colour.lost : colour.soft });
    if (this.blank) {
      const targets = group.run.sorted().filter(({ role }) => role === "target");
      const says = ["A target verifies a block of guesses in one forward.", "Another verifies the next at the same time."];
      this.explain(lane.role === "target" ? says[targets.indexOf(lane)] : "A drafter guesses token after token, also while its guesses are verified.", row);
    }
    this.clipped(row, () => {
      this.drawDowntime(row);
      const { spans } = lane;
      for (let i = upTo(spans, t0, (span) => span.end); i < spans.length; i++) {
        if (spans[i].start > t1 + 1) break;
        if (spans[i].start <= t1) this.span(row, spans[i]);
      }
    });
    for (const mark of lane.marks) this.mark(row, mark);
    if (!this.single && group.run.finish && (this.head ?? Infinity) >= group.run.end) {
      const x = this.x(group.run.end);
      this.line(x + 1, row.y - 3, x + 1, row.y + row.height + 3, colour.ink, [], 2);
    }
  }

  box(x, y, w, h, fill, radius, alpha = 1) {
    const pen = this.context;
    pen.globalAlpha = alpha;
    pen.fillStyle = fill;
    pen.beginPath();
    pen.roundRect(x, y, w, h, Math.min(radius, w / 2));
    pen.fill();
    pen.globalAlpha = 1;
  }

  span(row, span) {
    const { colour, context: pen } = this;
    const x = this.x(span.start), full = this.x(span.end) - x;
    const over = span === this.over;
    if (span.kind === "draft") {
      const w = Math.max(0.8, full > 3 ? full - 1 : full * 0.62);
      this.box(x, row.y + 2, w, row.height - 4, colour.guess, 1.5, span.stale ? 0.3 : full < 2 ? 0.8 : 0.92);
      if (over) this.box(x - 1, row.y - 2, w + 2, row.height + 4, colour.guess, 2);
      return;
    }
    const w = Math.max(1, full - (full > 4 ? 1 : 0.3));
    if (span.kind === "warm") {
      this.box(x, row.y + row.height * 0.3, w, row.height * 0.4, colour.target, 2, over ? 0.6 : 0.3);
    } else if (span.stale) {
      this.box(x, row.y, w, row.height, colour.target, 3, 0.12);
      if (w > 3) this.box(x, row.y, w, row.height, this.hatch("target"), 3, over ? 0.9 : 0.42);
    } else {
      this.box(x, row.y, w, row.height, colour.target, 3, 1);
    }
    if (span.texts > 1 && row.height > 6) this.box(x, row.y + row.height - 3, w, 3, colour.ink, 1, 0.45); // others share it
    if (over) {
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x - 1, row.y - 1.5, w + 2, row.height + 3);
    }
    if (span.kind !== "verify" || row.height < 14 || span.stale) return;
    const text = span.from === span.to ? `${span.from + 1}` : `${span.from + 1}–${span.to + 1}`;
    const size = this.single ? 11 : 9;
    pen.font = `600 ${size}px ${FONT}`;
    if (pen.measureText(text).width + 8 < w) this.label(text, x + w / 2, row.y + row.height / 2 + 0.5, { align: "center", size, weight: 600, colour: colour["on-target"] });
  }

  /** Strike a lane out while its server is down. */
  drawDowntime(row) {
    const { marks } = row.lane;
    marks.forEach((mark, i) => {
      if (mark.kind !== "lost") return;
      const back = marks.slice(i).find((other) => other.kind === "back");
      const x = this.x(mark.t), w = this.x(back ? back.t : row.group.run.clock()) - x;
      if (w > 1) this.box(x, row.y, w, row.height, this.hatch("lost"), 2, 0.4);
    });
  }

  mark(row, mark) {
    if (mark.t > (this.head ?? Infinity) || mark.t < this.view[0] || mark.t > this.view[1]) return;
    const pen = this.context, { colour } = this;
    const x = this.x(mark.t), y = row.y + row.height / 2, r = Math.min(8, row.height / 2 + 1);
    pen.fillStyle = colour.card;
    pen.strokeStyle = colour.lost;
    pen.lineWidth = 1.75;
    pen.beginPath();
    pen.arc(x, y, r, 0, 7);
    pen.fill();
    pen.stroke();
    pen.beginPath();
    const d = r * 0.42;
    if (mark.kind !== "back") {
      pen.moveTo(x - d, y - d); pen.lineTo(x + d, y + d);
      pen.moveTo(x - d, y + d); pen.lineTo(x + d, y - d);
    } else {
      pen.moveTo(x - d, y + d * 0.1); pen.lineTo(x - d * 0.2, y + d * 0.9); pen.lineTo(x + d, y - d * 0.8);
    }
    pen.stroke();
  }

  point(event) {
    if (!this.place || !this.groups.length) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const { left, right, width, rows } = this.place;
    const t = this.time(Math.max(left, Math.min(width - right, x)));
    const row = rows.find((row) => row.kind === "lane" && y >= row.y - 3 && y <= row.y + row.height + 5);
    this.over = row ? this.nearest(row.lane.spans, t) : null;
    this.draw();
    this.pointed({ t, row, span: this.over, x: event.clientX, y: event.clientY, box });
  }

  unpoint() {
    this.over = null;
    this.draw();
    this.pointed(null);
  }

  /** The forward at a time, or one so near that the difference cannot be seen. */
  nearest(spans, t) {
    const slack = (this.view[1] - this.view[0]) * 0.003;
    let best = null, least = slack;
    for (let i = upTo(spans, t - slack, (span) => span.end); i < spans.length && spans[i].start <= t + slack; i++) {
      const apart = Math.max(0, spans[i].start - t, t - spans[i].end);
      if (apart < least || (apart === 0 && least > 0)) [best, least] = [spans[i], apart];
    }
    return best && (this.head === null || best.start <= this.head) ? best : null;
  }
}

/** 1, 2 or 5 times a power of ten, at least so much. */
function nice(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((n) => n * power >= least * 0.999) * power;
}
