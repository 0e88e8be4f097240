// The text token by token, and the tooltip.

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function duration(s) {
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  return s < 0.9995 ? `${(s * 1000).toFixed(0)} ms` : `${s.toFixed(s < 9.995 ? 2 : 1)} s`;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "(nothing)";

/** What a screen reader says of a token without a letter to say; null of others. */
function spoken(text) {
  if (text.trim()) return null;
  const names = { "\n": "newline", "\t": "tab", " ": "space", "\r": "carriage return" };
  return [...text].map((character) => names[character] ?? "blank").join(" ") || "no text";
}

const ORIGINS = {
  accepted: "guessed by the drafter, accepted",
  corrected: "the target’s, for a wrong guess",
  plain: "the target’s, no guess was there",
};

/** The tooltip, placed beside a rectangle where it fits. */
export class Tip {
  constructor(node) {
    this.node = node;
    this.owner = null;
    addEventListener("scroll", () => this.hide(), { passive: true, capture: true });
  }

  show(owner, rectangle, ...content) {
    this.owner = owner;
    this.node.replaceChildren(...content);
    this.node.hidden = false;
    const { offsetWidth: w, offsetHeight: h } = this.node;
    const middle = (rectangle.left + rectangle.right) / 2;
    const x = Math.max(8, Math.min(document.documentElement.clientWidth - w - 8, middle - w / 2));
    const y = rectangle.top - h - 8 < 4 ? rectangle.bottom + 8 : rectangle.top - h - 8;
    this.node.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
  }

  hide(owner = this.owner) {
    if (owner !== this.owner) return;
    this.owner = null;
    this.node.hidden = true;
  }
}

/** Tokens in a row, reachable with the arrow keys; one of them can be reached with Tab. */
export class Text {
  constructor(node, tip, { pointed = () => {}, label = "Tokens of the text" } = {}) {
    this.node = node;
    this.tip = tip;
    this.pointed = pointed;
    this.label = label;
    this.clear("");
    const token = (event) => event.target.closest?.(".token");
    node.addEventListener("pointerover", (event) => token(event) && this.showTip(token(event)));
    node.addEventListener("pointerleave", () => this.hideTip());
    node.addEventListener("focusin", (event) => {
      if (!token(event)) return;
      this.rove(token(event));
      this.showTip(token(event));
    });
    node.addEventListener("focusout", () => this.hideTip());
    node.addEventListener("keydown", (event) => this.key(event));
  }

  clear(prompt) {
    this.tokens = [];
    this.shown = 0;
    this.node.classList.remove("spaced");
    this.space(prompt);
    this.current = null;
    this.list = element("span", { class: "tokens" });
    this.ghosts = element("span", { class: "ghosts", "aria-hidden": "true" });
    this.node.replaceChildren(element("span", { class: "prompt" }, prompt), this.list, this.ghosts);
  }

  add(tokens) {
    if (tokens.length && !this.tokens.length) {
      for (const [name, value] of [["role", "listbox"], ["aria-label", this.label], ["aria-orientation", "horizontal"]]) this.list.setAttribute(name, value);
    }
    for (const token of tokens) {
      const node = element("span", { class: `token ${token.how}`, role: "option", tabindex: "-1", "aria-selected": "false" }, token.text);
      const name = spoken(token.text);
      if (name) node.setAttribute("aria-label", name);
      node.dataset.index = this.tokens.length;
      this.tokens.push(token);
      this.list.append(node);
      if (!this.current) this.rove(node);
    }
    this.shown = this.tokens.length;
    this.space(tokens.map(({ text }) => text).join(""));
  }

  /** Where spaces mean something, as in code, all of them are kept; else those at the ends of lines are not shown. */
  space(text) {
    if (/[ \t]{2}|\t|\n /.test(text)) this.node.classList.add("spaced");
  }

  /** Show the first `count` tokens, and a box for each guess beyond them. Later tokens keep their space. */
  reveal(count, guesses = 0) {
    const nodes = this.list.children;
    for (; this.shown < count; this.shown++) nodes[this.shown].classList.remove("later");
    for (; this.shown > count; this.shown--) nodes[this.shown - 1].classList.add("later");
    for (const node of [...this.list.getElementsByClassName("guess")]) node.classList.remove("guess");
    for (let i = count; i < count + guesses && i < nodes.length; i++) nodes[i].classList.add("guess");
    const boxes = Math.max(0, Math.min(count + guesses - nodes.length, 40));
    while (this.ghosts.childElementCount > boxes) this.ghosts.lastChild.remove();
    while (this.ghosts.childElementCount < boxes) this.ghosts.append(element("i"));
  }

  /** Keep what has come last in view, where the text has a height of its own. */
  follow() {
    const { node } = this;
    if (node.scrollHeight <= node.clientHeight + 1) return;
    const last = this.list.children[this.shown - 1];
    node.scrollTop = last ? last.offsetTop + last.offsetHeight + 40 - node.clientHeight : 0;
  }

  /** Mark the tokens that a forward computes. */
  mark(from, to) {
    for (const node of this.list.querySelectorAll(".marked")) node.classList.remove("marked");
    if (from === undefined) return;
    const nodes = this.list.querySelectorAll(".token");
    for (let i = Math.max(0, from); i <= to && i < nodes.length; i++) nodes[i].classList.add("marked");
  }

  rove(node) {
    if (this.current) {
      this.current.tabIndex = -1;
      this.current.setAttribute("aria-selected", "false");
    }
    this.current = node;
    node.tabIndex = 0;
    node.setAttribute("aria-selected", "true");
  }

  key(event) {
    const from = event.target.closest?.(".token");
    if (!from || event.ctrlKey || event.metaKey || event.altKey) return;
    const nodes = [...this.list.querySelectorAll(".token:not(.later)")];
    const here = nodes.indexOf(from);
    const to = {
      ArrowRight: () => nodes[here + 1],
      ArrowLeft: () => nodes[here - 1],
      Home: () => nodes[0],
      End: () => nodes.at(-1),
      ArrowDown: () => this.beyond(nodes.slice(here + 1), from, 1),
      ArrowUp: () => this.beyond(nodes.slice(0, here).reverse(), from, -1),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    to()?.focus();
  }

  /** The token nearest below (or above) another one, in the next line that has any. */
  beyond(nodes, from, direction) {
    const middle = (box) => (box.left + box.right) / 2;
    const start = from.getClientRects()[0];
    let line = null, best = null, distance = Infinity;
    for (const node of nodes) {
      const box = node.getClientRects()[0];
      if (!box || (box.top - start.top) * direction < start.height / 2) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) > start.height / 2) break;
      const apart = Math.abs(middle(box) - middle(start));
      if (apart < distance) [best, distance] = [node, apart];
    }
    return best;
  }

  showTip(node) {
    const index = Number(node.dataset.index);
    const token = this.tokens[index];
    this.described?.removeAttribute("aria-describedby");
    this.described = node;
    node.setAttribute("aria-describedby", "tip");
    const boxes = node.getClientRects();
    this.tip.show(this, boxes[boxes.length - 1] ?? node.getBoundingClientRect(), ...about(token, index));
    this.pointed(token);
  }

  hideTip() {
    this.tip.hide(this);
    this.pointed(null);
    const focused = document.activeElement;
    if (focused?.classList.contains("token") && this.node.contains(focused) && focused.matches(":focus-visible")) this.showTip(focused);
  }
}

function about(token, index) {
  const head = element("p", { class: `tip-head ${token.how}` }, element("b", {}, visible(token.text)), ` ${ORIGINS[token.how] ?? token.how}`);
  const when = element("p", { class: "tip-note" }, `token ${index + 1}, verified after ${duration(token.at)}`);
  const list = element("ul", { class: "odds" });
  for (const [text, log] of token.alternatives ?? []) {
    const p = Math.exp(log);
    const bar = element("i", { "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, p * 100)}%`;
    const row = element("li", { class: text === token.text ? "is" : "" }, element("span", {}, visible(text)), element("em", {}, bar), element("b", {}, percent(p)));
    list.append(row);
  }
  return list.childElementCount ? [head, list, when] : [head, when];
}

const percent = (p) => (p >= 0.0995 ? `${(p * 100).toFixed(0)}%` : p >= 0.0005 ? `${(p * 100).toFixed(1)}%` : "<0.1%");
