// Draws the report's plots as SVG: curves with bands, points with bars, a legend that toggles, values on hover or tap.
// Text from records is set through textContent only.

const report = JSON.parse(document.getElementById("report-data").textContent);
const DASHES = report.dashes;
const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 34, right: 14, bottom: 44 };
const TICK_WIDTH = 7; // pixels per character of a tick label, rounded up
const MAX_IN_TIP = 10; // curves

function svg(parent, tag, attributes = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, tag, className = "", text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function paint(node, curve) {
  node.classList.add(`m-${curve.method}`);
  if (curve.shade < 1) {
    node.style.color = `color-mix(in oklab, var(--m-${curve.method}) ${100 * curve.shade}%, var(--surface))`;
  }
  return node;
}

/** Format a number with few digits: 0.00012, 95.49, 1.2e-7, 12,300. */
function formatNumber(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 10 ** digits ? Math.ceil(Math.log10(size) + 1e-9) : digits });
}

/** Format a value to the precision of its error: 95.49 ± 0.67. */
function withError(value, error) {
  if (error === null) return formatNumber(value, 5);
  const digits = 1 - Math.floor(Math.log10(error));
  if (error === 0 || digits < 0 || digits > 6) return `${formatNumber(value, 5)} ± ${formatNumber(error, 2)}`;
  return `${value.toFixed(digits)} ± ${error.toFixed(digits)}`;
}

// ---------------------------------------------------------------- axes

function linearTicks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= rough * 0.999) ?? 10);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(k * step);
  return ticks.map((t) => Number(t.toPrecision(12)));
}

function logTicks(low, high, wanted) {
  const ticks = [];
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / wanted));
  const within = Math.log10(high / low) <= 2 ? [1, 2, 5] : [1];
  for (let k = from; k <= to; k += every) for (const m of within) ticks.push(Number(`${m}e${k}`));
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

/** Return the map from values to pixels, and the ticks. */
function axis(low, high, start, end, { log = false, names = null, wanted = 5 } = {}) {
  if (names) {
    const place = (v) => start + ((v + 0.5) / names.length) * (end - start);
    return { place, ticks: names.map((name, k) => [k, name]) };
  }
  const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  const place = (v) => start + (((log ? Math.log10(v) : v) - a) / (b - a)) * (end - start);
  // A short logarithmic axis is nearly linear and may contain no 1, 2 or 5.
  const ticks = log && high > 5 * low ? logTicks(low, high, wanted) : linearTicks(low, high, wanted);
  return { place, ticks: ticks.map((t) => [t, formatNumber(t)]) };
}

/** Return the minimum and maximum with a margin; a single value gets a margin, too. */
function range(values, log, margin) {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (log) {
    const factor = high > low ? (high / low) ** margin : 1.5;
    return [low / factor, high * factor];
  }
  const pad = high > low ? margin * (high - low) : Math.abs(high) * 0.05 || 1;
  return [low - pad, high + pad];
}

// ---------------------------------------------------------------- a plot

class PlotView {
  constructor(element, plot) {
    this.plot = plot;
    this.canvas = element.querySelector(".plot");
    this.legend = element.querySelector(".legend");
    this.curves = plot.curves.map((s) => ({
      ...s,
      x: report.columns[s.x], y: report.columns[s.y], error: report.columns[s.error], count: report.columns[s.count],
    }));
    this.opened = false;
  }

  open() {
    if (this.opened) return;
    this.opened = true;
    this.tip = html(this.canvas, "div", "tip");
    this.tip.setAttribute("role", "status");
    for (const curve of this.curves) this.addToLegend(curve);
    document.addEventListener("pointerdown", (event) => {
      if (!this.canvas.contains(event.target)) this.hideTip();
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.draw();
  }

  addToLegend(curve) {
    const button = html(this.legend, "button");
    button.type = "button";
    button.setAttribute("aria-pressed", curve.visible);
    const swatch = svg(button, "svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    paint(svg(swatch, "line", { x1: 0, y1: 5, x2: 26, y2: 5, "stroke-dasharray": DASHES[curve.dash % DASHES.length] }), curve);
    html(button, "span", "", curve.name);
    button.addEventListener("click", () => {
      curve.visible = !curve.visible;
      button.setAttribute("aria-pressed", curve.visible);
      this.draw();
    });
  }

  draw() {
    const { plot, canvas } = this;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    this.root?.remove();
    this.hideTip();
    const shown = this.curves.filter((s) => s.visible);
    const root = (this.root = svg(canvas, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0 }));
    root.setAttribute("aria-label", `${plot.title}: ${plot.y_label} against ${plot.x_label}. Arrow keys read values.`);
    this.box = { left: 0, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    this.drawAxes(root, shown);
    const clip = `clip-${(PlotView.clips = (PlotView.clips ?? 0) + 1)}`;
    svg(svg(root, "clipPath", { id: clip }), "rect", {
      x: this.box.left, y: this.box.top - 5, width: Math.max(0, this.box.right - this.box.left + 5),
      height: this.box.bottom - this.box.top + 5,
    });
    const inside = svg(root, "g", { "clip-path": `url(#${clip})` });
    for (const curve of shown) this.drawCurve(inside, curve);
    this.cursor = svg(root, "line", { class: "cursor", y1: this.box.top, y2: this.box.bottom });
    this.listen(root, shown);
  }

  drawAxes(root, shown) {
    const { plot, box } = this;
    const xs = [], ys = [];
    for (const s of shown) {
      // The first tenth of training would compress the rest; the best value may be in it.
      const from = plot.highest === null ? 0 : Math.floor(s.x.length / 10);
      const best = s.y.reduce((a, b) => (plot.highest === a > b ? a : b));
      s.x.forEach((x, k) => {
        xs.push(x);
        if (k < from && s.y[k] !== best) return;
        const e = s.error[k] ?? 0;
        ys.push(s.y[k] + e);
        if (!plot.log_y || s.y[k] - e > 0.2 * s.y[k]) ys.push(s.y[k] - e);
      });
    }
    if (!xs.length) { xs.push(0, 1); ys.push(plot.log_y ? 0.1 : 0, 1); }
    if (plot.y_bounds) ys.push(...plot.y_bounds);
    const [x0, x1] = range(xs, plot.log_x, plot.log_x ? 0.03 : 0.01), [y0, y1] = range(ys, plot.log_y, 0.05);
    this.y = axis(y0, y1, box.bottom, box.top, { log: plot.log_y });
    box.left = 14 + TICK_WIDTH * Math.max(...this.y.ticks.map(([, name]) => name.length));
    const wanted = Math.max(3, Math.floor((box.right - box.left) / 90));
    this.x = axis(x0, x1, box.left, box.right, { log: plot.log_x, names: plot.ticks, wanted });
    for (const [value, name] of this.y.ticks) {
      const y = this.y.place(value);
      svg(root, "line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y });
      svg(root, "text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, name);
    }
    svg(root, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    for (const [value, name] of this.x.ticks) {
      const x = this.x.place(value);
      svg(root, "line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 });
      svg(root, "text", { x, y: box.bottom + 18, "text-anchor": "middle" }, name);
    }
    // Centred on the whole plot: on a narrow screen a long label needs its full width.
    const middle = this.canvas.clientWidth / 2;
    svg(root, "text", { class: "label x", x: middle, y: box.bottom + 38, "text-anchor": "middle" }, plot.x_label);
    // Above the axis: horizontal text is easier to read.
    svg(root, "text", { class: "label y", x: 2, y: 14 }, plot.y_label);
  }

  drawCurve(parent, curve) {
    const { x, y, error, count } = curve;
    const group = paint(svg(parent, "g", { class: "series" }), curve);
    const at = (k, value) => `${this.x.place(x[k]).toFixed(1)},${this.y.place(value).toFixed(1)}`;
    const floor = (value, k) => (this.plot.log_y ? Math.max(value, y[k] / 1e3) : value);
    const dash = DASHES[curve.dash % DASHES.length];
    const most = Math.max(...count);
    if (this.plot.points) {
      x.forEach((_, k) => {
        if (error[k] === null) return;
        const px = this.x.place(x[k]);
        const ends = { y1: this.y.place(floor(y[k] - error[k], k)), y2: this.y.place(y[k] + error[k]) };
        svg(group, "line", { class: "bar", x1: px, x2: px, ...ends });
      });
    } else {
      const known = x.map((_, k) => k).filter((k) => error[k] !== null);
      if (known.length > 1) {
        const upper = known.map((k) => at(k, y[k] + error[k])), lower = known.map((k) => at(k, floor(y[k] - error[k], k)));
        svg(group, "path", { class: "band", d: `M${upper.join("L")}L${lower.reverse().join("L")}Z` });
      }
    }
    if (count.some((c) => c < most)) {
      svg(group, "path", { class: "curve thin", d: `M${x.map((_, k) => at(k, y[k])).join("L")}` });
    }
    let solid = "";
    x.forEach((_, k) => {
      const joined = k > 0 && count[k - 1] === most && !curve.gaps.includes(k);
      if (count[k] === most) solid += (joined ? "L" : "M") + at(k, y[k]);
    });
    svg(group, "path", { class: "curve", d: solid, "stroke-dasharray": dash });
    if (this.plot.points || x.length === 1) {
      x.forEach((_, k) => svg(group, "circle", { class: "point", cx: this.x.place(x[k]), cy: this.y.place(y[k]), r: 4 }));
    }
  }

  // -------------------------------------------------------------- values on hover, touch and arrow keys

  listen(root, shown) {
    const nearest = (event) => {
      const frame = root.getBoundingClientRect();
      const px = event.clientX - frame.left, py = event.clientY - frame.top;
      let best = null, least = Infinity;
      for (const curve of shown) {
        curve.x.forEach((x, k) => {
          // Weight x more: curves are read at a position.
          const away = 9 * (this.x.place(x) - px) ** 2 + (this.y.place(curve.y[k]) - py) ** 2;
          if (away < least) [least, best] = [away, { curve, k }];
        });
      }
      if (best) this.showTip(best.curve, best.k, shown);
    };
    root.addEventListener("pointermove", nearest);
    root.addEventListener("pointerdown", nearest);
    // Lifting a finger also fires pointerleave. After a tap the values stay until the next tap elsewhere.
    root.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.hideTip();
    });
    root.addEventListener("blur", () => this.hideTip());
    root.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !shown.length) return;
      event.preventDefault();
      const last = shown[0].x.length - 1;
      this.read = this.read === undefined ? (step > 0 ? 0 : last) : Math.min(last, Math.max(0, this.read + step));
      this.showTip(shown[0], this.read, shown);
    });
  }

  showTip(curve, k, shown) {
    const { plot, tip, cursor } = this;
    const x = curve.x[k], px = this.x.place(x);
    cursor.setAttribute("x1", px);
    cursor.setAttribute("x2", px);
    cursor.style.visibility = "visible";
    tip.replaceChildren();
    html(tip, "p", "", plot.ticks ? `${plot.x_label}: ${plot.ticks[x]}` : `${plot.x_label}: ${formatNumber(x, 5)}`);
    const here = shown.map((s) => ({ s, k: s === curve ? k : s.x.indexOf(x) })).filter((e) => e.k >= 0);
    here.sort((a, b) => b.s.y[b.k] - a.s.y[a.k]);
    for (const entry of here.slice(0, MAX_IN_TIP)) this.addToTip(entry.s, entry.k, entry.s === curve);
    if (here.length > MAX_IN_TIP) html(tip, "p", "", `and ${here.length - MAX_IN_TIP} more`);
    const right = px + 14 + tip.offsetWidth < this.canvas.clientWidth;
    tip.style.left = `${right ? px + 14 : Math.max(0, px - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${Math.max(0, Math.min(this.y.place(curve.y[k]) - 20, this.box.bottom - tip.offsetHeight))}px`;
    tip.style.visibility = "visible";
  }

  addToTip(curve, k, isNear) {
    const line = html(this.tip, "p", isNear ? "near" : "");
    const dot = paint(svg(line, "svg", { class: "dot", viewBox: "0 0 10 10" }), curve);
    svg(dot, "circle", { cx: 5, cy: 5, r: 5 });
    const most = Math.max(...curve.count);
    const runs = curve.count[k] < most ? ` (${curve.count[k]} of ${most} runs)` : "";
    line.append(`${curve.name}  ${withError(curve.y[k], curve.error[k])}${runs}`);
  }

  hideTip() {
    this.tip.style.visibility = "hidden";
    if (this.cursor) this.cursor.style.visibility = "hidden";
    this.read = undefined;
  }
}

const plots = new Map();
for (const element of document.querySelectorAll("figure[data-plot]")) {
  plots.set(element, new PlotView(element, report.plots[Number(element.dataset.plot)]));
}
