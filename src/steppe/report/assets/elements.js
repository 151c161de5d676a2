// Elements, numbers, and what every chart shares. Text enters the page by text nodes alone.

const COLOURS = 7;
const DASHES = ["", "7 4", "2 4", "9 3 2 3"]; // another for each round of colours

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const known = (value) => value !== null && value !== undefined;
const colour = (place) => `c${place % COLOURS}`;
const dash = (place) => DASHES[Math.floor(place / COLOURS) % DASHES.length] || null;
const minus = (text) => (Number(text) === 0 ? text.replace("-", "") : text.replace(/^-|(?<=e)-/g, "−"));
const fixed = (value, digits = 2) => (known(value) ? minus(value.toFixed(digits)) : "–");
const withSpread = (mean, std, digits = 2) => fixed(mean, digits) + (known(std) ? ` ± ${fixed(std, digits)}` : "");
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const short = (text, width) => {
  const room = Math.max(3, Math.floor(width / 6.6));
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
};
const significant = (value) => {
  if (!known(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5)) return minus(value.toExponential(1));
  return minus(String(Number(value.toPrecision(3))));
};

const roughly = (mean, std) => significant(mean) + (known(std) ? ` ± ${significant(std)}` : "");

function taskName(section, place) {
  return section.tasks[place] ? `task ${place + 1}: ${section.tasks[place]}` : `task ${place + 1}`;
}

/** Round steps that cover a range in about `count` parts. */
function ticks(low, high, count) {
  const rough = Math.max((high - low) / count, 1e-12);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return { values: found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

/** A sample of a line or of an area, for legends. */
function swatch(place, area = false) {
  const sample = area
    ? draw("rect", { class: "bar", x: 4, y: 0, width: 14, height: 10 })
    : draw("line", { class: "line", x1: 1, y1: 5, x2: 21, y2: 5, "stroke-dasharray": dash(place) });
  return draw("svg", { class: `swatch ${colour(place)}`, viewBox: "0 0 22 10", "aria-hidden": "true" }, sample);
}

/** A box beside the pointer; screen readers hear it as it changes. */
class Tooltip {
  constructor(host) {
    this.host = host;
    this.box = make("div", { class: "tooltip", role: "status", hidden: true });
    host.append(this.box);
  }

  /** Rows are [swatch or null, name, value]; x and y are in the host's pixels. */
  show(x, y, title, rows) {
    this.box.replaceChildren(
      make("p", {}, title),
      ...rows.map(([mark, name, value]) =>
        make("div", {}, mark || make("i"), make("span", {}, name), make("span", {}, value))),
    );
    this.box.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const room = Math.max(this.host.clientWidth - width, 0);
    const beside = x + 16 <= room ? x + 16 : x - width - 16;
    // Where there is no room beside the point, as on a phone, the box goes below it.
    this.box.style.left = `${beside >= 0 ? beside : clamp(x - width / 2, 0, room)}px`;
    this.box.style.top = `${beside >= 0 ? Math.max(0, y - height / 2) : y + 24}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}

/** A chart that is drawn anew whenever its width changes; `paint(svg, width)` gives its height. */
class Chart {
  constructor(label) {
    this.host = make("div", { class: "chart" });
    this.svg = draw("svg", { role: "img", tabindex: 0, "aria-label": label });
    this.host.append(this.svg);
    this.tooltip = new Tooltip(this.host);
    this.at = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => {
      const changed = this.host.clientWidth && this.host.clientWidth !== this.width;
      if (!this.spec || !changed) return;
      const { at } = this;
      this.redraw();
      if (at !== null) this.choose(at); // what the reader looks at stays
    }).observe(this.host);
  }

  describe(label) {
    this.svg.setAttribute("aria-label", label);
  }

  redraw() {
    this.width = this.host.clientWidth || 720;
    this.leave();
    this.svg.replaceChildren();
    const height = this.paint(this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = this.width / box.width;
    this.choose(this.nearest((event.clientX - box.left) * scale, (event.clientY - box.top) * scale));
  }

  press(event) {
    if (event.key === "Escape") this.leave();
    const moved = this.moved(this.at, event.key);
    if (moved === undefined) return;
    event.preventDefault();
    this.choose(moved);
  }

  choose(at) {
    this.at = at;
    if (at === null) this.leave();
    else this.mark(at);
  }

  leave() {
    this.at = null;
    this.tooltip.hide();
    this.unmark();
  }
}
