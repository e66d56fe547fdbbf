// Draws the figures of views in a page as SVG: those parts of plotly's JSON that views use, in the page's own colours.

const KINDS = { bar: bars, scatter: points, treemap };        // kind of trace → what lays it out
const DASHES = { dash: "9 5", dot: "2 4", dashdot: "9 4 2 4", longdash: "14 5", longdashdot: "14 4 2 4" };
const PATTERNS = {                                // in a tile of 6 by 6
  "/": "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", "\\": "M-1 -1L7 7M5 -1L7 1M-1 5L1 7", x: "M0 0L6 6M6 0L0 6",
  "-": "M0 3H6", "|": "M3 0V6", "+": "M0 3H6M3 0V6", ".": "M2 3H4",
};
const SYMBOLS = {                                 // of radius 1
  circle: "M-1 0A1 1 0 1 1 1 0A1 1 0 1 1 -1 0Z", square: "M-.85 -.85H.85V.85H-.85Z", diamond: "M0 -1.2L1 0L0 1.2L-1 0Z",
  cross: "M-.35 -1H.35V-.35H1V.35H.35V1H-.35V.35H-1V-.35H-.35Z", "triangle-up": "M0 -1.1L1 .8H-1Z",
  "triangle-down": "M0 1.1L1 -.8H-1Z", x: "M-1 -.6L-.6 -1L0 -.4L.6 -1L1 -.6L.4 0L1 .6L.6 1L0 .4L-.6 1L-1 .6L-.4 0Z",
  star: "M0 -1.2L.3 -.4L1.1 -.4L.5 .15L.7 1L0 .5L-.7 1L-.5 .15L-1.1 -.4L-.3 -.4Z",
};
const INKS = ["#000000", "black", "#222", "#444", "#555555"], CHARACTER = 6.7;

// what is drawn in black or white has the page's colours
const ink = (colour) => (INKS.includes(colour) ? "currentColor" : colour === "white" ? "var(--page)" : colour);
const plainly = (text) => String(text).replace(/<br>/g, ", ").replace(/<[^>]*>/g, "")
  .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
const nth = (value, i) => (Array.isArray(value) ? value[i] : value);
const round = (n) => Math.round(n * 100) / 100;
const spoken = (n) => (typeof n === "number" ? Number(n.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }) : n);

function svg(kind, parent, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  return parent.appendChild(made);
}

// a hover template's words for the i-th point
function said(trace, i, point) {
  const value = (path) => {
    const [name, place] = path.replace("]", "").split("[");
    const found = name in point ? point[name] : nth(trace[`${name}s`] ?? trace[name], i);
    return place === undefined ? found : found[place];
  };
  return (trace.hovertemplate ?? `%{y}: %{x}<extra>${trace.name}</extra>`).replace(/%\{([\w[\]]+)(?::,?\.?(\d*)([fg]))?\}/g, (_, path, digits, form) => {
    const found = value(path);
    if (typeof found !== "number" || !form) return spoken(found);
    return form === "f" ? found.toFixed(digits) : digits ? `${Number(found.toPrecision(digits))}` : `${found}`;
  }).replace(/<extra><\/extra>/, "").replace(/<extra>(.*)<\/extra>/, "\n$1").replace(/<br>/g, "\n");
}

// An axis: where a value is, in pixels, and its ticks. A category's place is its number.
function scaled(axis, values, from, to) {
  const span = Math.abs(to - from), some = values.filter((value) => value !== null);
  if (axis.type === "log") return logarithmic(axis, some, from, to);
  const names = axis.categoryarray ?? (axis.type === "category" || some.some((value) => typeof value === "string")
    ? [...new Set(some.map(String))] : null);
  let [low, high] = axis.range ?? (names ? [-0.5, names.length - 0.5]
    : [Math.min(0, ...some), Math.max(...some) * (axis.tight ? 1 : 1.05)]);
  if (low === high) high = low + 1;
  const number = (value) => (names && typeof value === "string" ? names.indexOf(value) : value);
  const at = (value) => from + ((number(value) - low) / (high - low)) * (to - from);
  if (names) return { at, number, ticks: names.map((name) => [name, plainly(name)]) };
  const rough = Math.abs(high - low) / Math.max(3, span / 70), size = 10 ** Math.floor(Math.log10(rough));
  const least = axis.dtick ?? (some.length && some.every((value) => Number.isInteger(2 * value)) ? 1 : 0);     // of whole bars
  const step = Math.max([1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough), least);
  const ticks = [];
  for (let n = Math.ceil(Math.min(low, high) / step); n * step <= Math.max(low, high) * 1.000001; n++)
    ticks.push([n * step, spoken(n * step)]);
  return { at, number, ticks };
}

function logarithmic(axis, values, from, to) {
  const logs = values.filter((value) => value > 0).map(Math.log10);
  const [low, high] = axis.range ?? [Math.min(...logs) - 0.05, Math.max(...logs) + 0.05];
  const at = (value) => from + ((Math.log10(value) - low) / (high - low)) * (to - from);
  const ticks = (axis.tickvals ?? []).filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
  return { at, number: (value) => value, ticks: ticks.map((value) => [value, spoken(value)]) };
}

// Bars as {trace, i, from, to, place, size}: from and to along the values, place and size, of 1, across.
function bars(traces, layout) {
  if (!traces.length) return [];
  const along = traces[0].orientation === "h" ? "x" : "y", across = along === "x" ? "y" : "x";
  const group = layout.barmode === "group", gap = layout.bargap ?? 0.2, ends = new Map();
  return traces.flatMap((trace, n) => trace[along].map((value, i) => {
    const key = trace[across][i], size = (1 - gap) / (group ? traces.length : 1);
    const from = nth(trace.base, i) ?? (layout.barmode === "stack" ? ends.get(key) ?? 0 : 0);
    if (layout.barmode === "stack") ends.set(key, from + value);
    return { trace, i, along, across, from, to: from + value, key, size,
      shift: group ? (n - (traces.length - 1) / 2) * size : 0 };
  }));
}

function points(traces) {
  return traces.flatMap((trace) => trace.x.map((x, i) => ({ trace, i, x, y: trace.y[i] })));
}

class Picture {
  constructor(parent, wide) {
    this.host = parent;
    this.wide = wide;
    this.legend = element("div", parent, { className: "legend" });
    this.marks = [];                              // {x, y, wide, high, or r; text, act}: what is under the pointer
    this.patterns = {};
  }

  // a look laid over a colour
  filled(parent, { shape, fgcolor = "white", fgopacity = 1 } = {}, box) {
    if (!shape) return;
    const id = `p${[...`${shape}${fgcolor}${fgopacity}`].map((sign) => sign.codePointAt(0).toString(36)).join("")}`;
    if (!document.getElementById(id)) {
      const defs = svg("svg", document.body, { width: 0, height: 0, style: "position:absolute", "aria-hidden": true });
      const tile = svg("pattern", defs, { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
      svg("path", tile, { d: PATTERNS[shape], stroke: fgcolor, "stroke-opacity": fgopacity, "stroke-width": shape === "." ? 2 : 1.2 });
    }
    svg("rect", parent, { ...box, fill: `url(#${id})`, "pointer-events": "none" });
  }

  // a name in the legend, once, with its look
  named(trace, i = 0) {
    const line = element("span", this.legend), look = svg("svg", line, { width: 26, height: 14 });
    const { marker = {} } = trace, colour = ink(nth(marker.color ?? trace.line?.color, i));
    if (trace.type === "bar") {
      const box = { x: 1, y: 1, width: 24, height: 12 };
      svg("rect", look, { ...box, fill: colour, stroke: "currentColor", "stroke-width": 0.7 });
      this.filled(look, marker.pattern, box);
    } else {
      if ((trace.mode ?? "").includes("lines")) this.line(look, "M0 7H26", trace.line);
      if ((trace.mode ?? "").includes("markers")) this.symbol(look, marker, 13, 7, 5, colour);
    }
    element("span", line, { textContent: plainly(trace.name) });
  }

  line(parent, d, { color, dash, width = 2 }) {
    svg("path", parent, { d, fill: "none", stroke: ink(color), "stroke-width": width, "stroke-dasharray": DASHES[dash] });
  }

  symbol(parent, { symbol = "circle", line = {} }, x, y, r, colour) {
    svg("path", parent, { d: SYMBOLS[symbol], fill: colour, transform: `translate(${round(x)} ${round(y)}) scale(${r})`,
      stroke: ink(line.color), "stroke-width": line.color ? (line.width ?? 1) / r : undefined });
  }

  // The figure with axes: panels of bars, lines and points.
  axes({ data, layout }, acts) {
    const high = layout.height ?? 450, ids = [...new Set(data.map((trace) => `${trace.xaxis ?? "x"} ${trace.yaxis ?? "y"}`))];
    const axis = (id) => layout[id.replace(/^[xy]/, "$&axis")] ?? {};
    const group = (id) => axis(id).matches ?? id;
    const values = (which, id) => data.flatMap((trace) => {
      if (group(trace[`${which}axis`] ?? which) !== group(id)) return [];
      const { array = [], arrayminus = [] } = trace[`error_${which}`] ?? {};
      const ends = array.flatMap((more, i) => [trace[which][i] + more, trace[which][i] - arrayminus[i]]);
      const own = [...trace[which], ...ends], names = own.filter((value) => typeof value === "string");
      return names.length || trace.type !== "bar" ? own : [];
    });
    const work = ids.map((id) => {
      const [x, y] = id.split(" "), mine = data.filter((trace) => `${trace.xaxis ?? "x"} ${trace.yaxis ?? "y"}` === id);
      const laid = (type) => KINDS[type](mine.filter((trace) => trace.type === type), layout);
      return { x, y, bars: laid("bar"), points: laid("scatter") };
    });
    const barred = (which, id) => work.flatMap((panel) => (group(panel[which]) !== group(id) ? [] : panel.bars.flatMap((bar) =>
      bar.along === which ? [bar.from, bar.to] : typeof bar.key === "number" ? [bar.key - 0.5, bar.key + 0.5] : [])));
    const longest = Math.max(...work.map((panel) => (axis(panel.y).showticklabels === false ? 0
      : Math.max(2, ...values("y", panel.y).filter((v) => typeof v === "string").map((v) => plainly(v).length)))));
    const left = Math.min(0.4 * this.wide, 14 + longest * CHARACTER + 22), right = 22, top = layout.annotations ? 42 : 10, bottom = 44;
    const room = svg("svg", this.host, { width: this.wide, height: high, class: "plot", role: "img", "aria-label": layout.alt });
    const inner = { x: left, y: top, wide: this.wide - left - right, high: high - top - bottom };
    const places = {};
    for (const panel of work) {
      const [x0, x1] = axis(panel.x).domain ?? [0, 1], [y0, y1] = axis(panel.y).domain ?? [0, 1];
      const box = { x: inner.x + x0 * inner.wide, y: inner.y + (1 - y1) * inner.high, wide: (x1 - x0) * inner.wide, high: (y1 - y0) * inner.high };
      const scale = (which, id, from, to) => scaled({ ...axis(id), tight: which === "x" && !panel.bars.some((b) => b.along === "x") },
        [...values(which, id), ...barred(which, id)], from, to);
      const x = scale("x", panel.x, box.x, box.x + box.wide), y = scale("y", panel.y, box.y + box.high, box.y);
      Object.assign(places, { [panel.x]: { box, scale: x }, [panel.y]: { box, scale: y } });
      this.frame(room, box, x, y, axis(panel.x), axis(panel.y));
      this.bars(room, panel.bars, { x, y }, acts);
      this.points(room, panel.points, x, y);
    }
    this.notes(room, layout, places, inner);
    return room;
  }

  frame(room, box, x, y, xAxis, yAxis) {
    const rule = (x1, y1, x2, y2, name) => svg("line", room, { x1: round(x1), y1: round(y1), x2: round(x2), y2: round(y2), class: name });
    const foot = box.y + box.high;
    for (const [value, name] of x.ticks) {
      const at = x.at(value);
      if (xAxis.showgrid !== false) rule(at, box.y, at, foot, "grid");
      if (xAxis.showticklabels !== false) svg("text", room, { x: at, y: foot + 17, "text-anchor": "middle" }, name);
    }
    for (const [value, name] of y.ticks) {
      const at = y.at(value);
      if (yAxis.showgrid !== false) rule(box.x, at, box.x + box.wide, at, "grid");
      if (yAxis.showticklabels === false) continue;
      const label = svg("text", room, { x: box.x - 6, y: at + 4, "text-anchor": "end" }, name);
      if (String(value).startsWith("<b>")) label.setAttribute("font-weight", "bold");
    }
    rule(box.x, box.y, box.x, foot, "axis");
    rule(box.x, foot, box.x + box.wide, foot, "axis");
    const middle = box.y + box.high / 2;
    if (xAxis.title?.text) svg("text", room, { x: box.x + box.wide / 2, y: foot + 37, "text-anchor": "middle" }, plainly(xAxis.title.text));
    if (yAxis.title?.text)
      svg("text", room, { x: 0, y: 0, "text-anchor": "middle", transform: `translate(12 ${middle}) rotate(-90)` }, plainly(yAxis.title.text));
  }

  bars(room, every, scales, acts) {
    for (const { trace, i, along, across, from, to, key, size, shift } of every) {
      const { marker } = trace, a = scales[along], c = scales[across], middle = c.number(key) + shift;
      const [low, high] = [a.at(from), a.at(to)].sort((p, q) => p - q);
      const [near, far] = [c.at(middle - size / 2), c.at(middle + size / 2)].sort((p, q) => p - q);
      const [x, y, width, height] = (along === "x" ? [low, near, high - low, far - near] : [near, low, far - near, high - low]).map(round);
      const box = { x, y, width: Math.max(width, 0.5), height: Math.max(height, 0.5) };
      const edge = nth(marker.line?.color, i) ?? "black";
      const hides = Math.min(width, height) < 4 && edge !== nth(marker.color, i);      // an edge that would cover the bar
      svg("rect", room, { ...box, fill: ink(nth(marker.color, i)), stroke: hides ? "none" : ink(edge),
        "stroke-width": nth(marker.line?.width, i) ?? 0.7 });
      this.filled(room, marker.pattern, box);
      const text = nth(trace.text, i);
      if (text && trace.textposition === "outside")
        svg("text", room, { x: x + width + 4, y: y + height / 2 + 3.5, class: "small" }, text);
      else if (text && width > CHARACTER * text.length + 2 && height > 12)
        svg("text", room, { x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle", fill: trace.textfont?.color }, text);
      this.marks.push({ x, y, wide: Math.max(width, 2), high: Math.max(height, 2), act: along === "y" && acts.go && (() => acts.go(key)),
        text: said(trace, i, { base: from, [along]: trace[along][i], [across]: plainly(key) }) });
    }
  }

  points(room, every, x, y) {
    const lines = Map.groupBy ? Map.groupBy(every, ({ trace }) => trace) : new Map();
    if (!Map.groupBy) every.forEach((point) => lines.set(point.trace, [...(lines.get(point.trace) ?? []), point]));
    for (const [trace, own] of lines) {
      const { mode = "lines", marker = {}, line = {} } = trace;
      if (mode.includes("lines")) this.line(room, own.map((p, i) => `${i ? "L" : "M"}${round(x.at(p.x))} ${round(y.at(p.y))}`).join(""), line);
      for (const p of own) {
        const at = { x: x.at(p.x), y: y.at(p.y) }, colour = ink(nth(marker.color ?? line.color, p.i));
        const { array, arrayminus } = trace.error_x ?? {}, middle = trace.x[p.i];
        if (array) this.line(room, `M${round(x.at(middle - arrayminus[p.i]))} ${round(at.y)}H${round(x.at(middle + array[p.i]))}`,
          { color: INKS[0], width: 1.5 });
        if (mode.includes("markers")) this.symbol(room, marker, at.x, at.y, (nth(marker.size, p.i) ?? 9) / 2, colour);
        this.marks.push({ ...at, r: 24, text: said(trace, p.i, p) });
      }
    }
  }

  // lines and words over the panels
  notes(room, { shapes = [], annotations = [] }, places, inner) {
    const at = (ref, value, which) => {
      const [id, domain] = (ref ?? which).split(" "), box = id === "paper" ? inner : places[id].box;
      if (id !== "paper" && !domain) return places[id].scale.at(value);
      return which === "x" ? box.x + value * box.wide : box.y + (1 - value) * box.high;
    };
    for (const { x0, x1, y0, y1, xref, yref, line } of shapes)
      this.line(room, `M${at(xref, x0, "x")} ${at(yref, y0, "y")}L${at(xref, x1, "x")} ${at(yref, y1, "y")}`, line);
    for (const { x, y, xref, yref, yshift = 0, text, xanchor } of annotations) {
      const wide = CHARACTER * plainly(text).length, anchor = xanchor === "left" ? "start" : "middle";
      const place = at(xref, x, "x"), most = this.wide - (anchor === "start" ? wide : wide / 2);
      svg("text", room, { x: Math.max(anchor === "start" ? 2 : wide / 2, Math.min(place, most)), y: at(yref, y, "y") - yshift - 5,
        "text-anchor": anchor, class: "head" }, plainly(text));
    }
  }
}

// A treemap, whose rectangles open: rows of rectangles that are as square as can be.
function squared(sizes, x, y, wide, high) {
  const found = [];
  let rest = sizes.reduce((sum, size) => sum + size, 0), row = [], i = 0;
  const worst = (some, side, area) => {
    const sum = some.reduce((a, b) => a + b, 0), depth = (sum / rest) * (area / side);
    return Math.max(...some.map((size) => Math.max(depth / ((size / sum) * side), ((size / sum) * side) / depth)));
  };
  while (i < sizes.length) {
    const side = Math.min(wide, high), area = wide * high;
    row = [sizes[i]];
    while (i + row.length < sizes.length && worst([...row, sizes[i + row.length]], side, area) <= worst(row, side, area))
      row.push(sizes[i + row.length]);
    const sum = row.reduce((a, b) => a + b, 0), depth = sum && (sum / rest) * Math.max(wide, high);
    let along = 0;
    for (const size of row) {
      const part = sum && (size / sum) * side;
      found.push(wide > high ? [x, y + along, depth, part] : [x + along, y, part, depth]);
      along += part;
    }
    if (wide > high) (x += depth), (wide -= depth);
    else (y += depth), (high -= depth);
    rest -= sum;
    i += row.length;
  }
  return found;
}

function treemap(picture, { data: [trace], layout }, state, redraw) {
  const { ids, parents, labels, values, marker } = trace, high = layout.height, wide = picture.wide;
  const under = new Map();
  ids.forEach((_, i) => (under.get(parents[i]) ?? under.set(parents[i], []).get(parents[i])).push(i));
  const place = new Map(ids.map((id, i) => [id, i])), root = place.get(state.root) ?? 0;
  const { colorscale, cmin, cmax } = marker;
  const mixed = (value) => {
    const at = (colorscale.length - 1) * Math.max(0, Math.min(1, (value - cmin) / (cmax - cmin || 1)));
    const below = Math.min(Math.floor(at), colorscale.length - 2);
    const [from, to] = [below, below + 1].map((n) => [1, 3, 5].map((k) => parseInt(colorscale[n][1].slice(k, k + 2), 16)));
    return from.map((part, k) => Math.round(part + (at - below) * (to[k] - part)));
  };
  const way = [];
  for (let i = root; i !== undefined; i = place.get(parents[i])) way.unshift(i);
  const path = element("nav", picture.legend, { className: "path" });
  way.forEach((i) => element("button", path, { textContent: labels[i], title: `open ${labels[i]}`, onclick: () => redraw(ids[i]) }));
  if (marker.showscale) {
    const line = element("span", picture.legend);
    element("span", line, { textContent: `${plainly(marker.colorbar.title.text)}: ${spoken(cmin)}` });
    element("span", line, {}, `width:9em;height:12px;background:linear-gradient(to right,${colorscale.map(([, hex]) => hex)})`);
    element("span", line, { textContent: spoken(cmax) });
  }
  const room = svg("svg", picture.host, { width: wide, height: high, class: "plot", role: "img", "aria-label": layout.alt });
  const draw = (i, x, y, w, h, depth) => {
    const inside = depth < 2 && under.get(ids[i]), value = marker.colors[i];
    const rgb = value === null ? [150, 150, 150] : mixed(value), light = 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2] > 115;
    svg("rect", room, { x: round(x), y: round(y), width: round(Math.max(w, 0)), height: round(Math.max(h, 0)), fill: `rgb(${rgb})`, class: "part" });
    picture.marks.push({ x, y, wide: w, high: h, text: said(trace, i, {}),
      act: under.get(ids[i]) ? () => redraw(ids[i]) : depth ? () => redraw(parents[i]) : null });
    const most = Math.floor((w - 6) / CHARACTER), head = inside && h > 34 && w > 30 && depth ? 16 : 0;
    if (h > 14 && most >= 2 && depth && (head || !inside)) {
      const number = labels[i].match(/\d+$/)?.[0] ?? "", fits = labels[i].length <= most;     // which tells them apart
      const cut = number ? (number.length + 4 > most ? number : `…${labels[i].slice(1 - most)}`) : `${labels[i].slice(0, most - 1)}…`;
      const name = fits ? labels[i] : cut.length <= most ? cut : "";
      svg("text", room, { x: x + 4, y: y + 12, class: "small", fill: light ? "#000" : "#fff" }, name);
    }
    if (!inside || w < 3 || h < 3) return;
    const order = [...inside].sort((a, b) => values[b] - values[a]), edge = depth ? 1 : 0;
    squared(order.map((k) => values[k]), x + edge, y + head + edge, w - 2 * edge, h - head - 2 * edge)
      .forEach((box, k) => draw(order[k], ...box, depth + 1));
  };
  draw(root, 0, 0, wide, high, 0);
  return room;
}

// A figure in an element, which is drawn anew in the same place. state : what a person has opened. go(x) : to where a bar is.
function drawn(host, figure, state, go) {
  const wide = host.clientWidth, { data, layout } = figure, strange = data.find(({ type }) => !(type in KINDS));
  if (strange) throw new Error(`a page draws traces of ${Object.keys(KINDS)}, and none of ${strange.type}`);
  const redraw = (root) => {
    state.root = root;
    drawn(host, figure, state, go);
  };
  host.style.minHeight = `${host.offsetHeight}px`;             // the page must not jump
  host.replaceChildren();
  const picture = new Picture(host, wide);
  const titled = plainly(layout.legend?.title?.text ?? "");
  if (titled) element("span", picture.legend, { textContent: titled }, "font-style:italic");
  if (data[0].type !== "treemap" && layout.showlegend !== false)
    data.filter((trace) => trace.name && trace.showlegend !== false).forEach((trace) => picture.named(trace));
  const room = data[0].type === "treemap" ? treemap(picture, figure, state, redraw) : picture.axes(figure, { go });
  host.style.minHeight = "";
  const under = (event) => {
    const box = room.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const on = picture.marks.findLast((m) => m.wide && x >= m.x && x <= m.x + m.wide && y >= m.y && y <= m.y + m.high);
    const far = (m) => Math.hypot(x - m.x, y - m.y);
    const near = picture.marks.filter((m) => m.r && far(m) < m.r).sort((a, b) => far(a) - far(b))[0];
    return near && (!on || far(near) < 8) ? near : on;
  };
  pointing(room, host, (event) => {
    const found = under(event);
    room.style.cursor = found?.act ? "pointer" : "";
    return found?.text;
  });
  room.onclick = (event) => under(event)?.act?.();
}
